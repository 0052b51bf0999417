"""GET /ui, the cluster's page, and /ui/state, its data, small enough to be asked for every second.

The page itself holds no figures. Its data needs an operator's key where keys are set, as /cluster does.
"""

from __future__ import annotations

import importlib.resources
from functools import cache

import msgspec

from tandem.router.http.exchange import HttpExchange, send_json, send_page
from tandem.router.http.services import Services
from tandem.router.http.sibling_desk import page_of_all
from tandem.router.page_state import NodeRow
from tandem.router.pool import Member


@cache
def _page() -> bytes:
    return importlib.resources.files(__package__).joinpath("ui.html").read_bytes()


async def page(services: Services, exchange: HttpExchange) -> None:
    await send_page(exchange.send, _page())


async def state(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    page = await page_of_all(services)
    nodes = [_row(services, member) for member in services.pool.members]
    await send_json(
        exchange.send,
        msgspec.structs.replace(page, nodes=nodes),
        headers=((b"cache-control", b"no-store"),),
    )


def _row(services: Services, member: Member) -> NodeRow:
    info, status = member.info, member.reported
    why = services.pool.unusable(member) or ""
    if status is None:
        return NodeRow(info.node_id, info.role.value, "unknown", why)
    counters = member.counters
    return NodeRow(
        info.node_id,
        info.role.value,
        "lost" if member.lost else status.state.value,
        status.detail or why,
        status.running,
        status.waiting,
        status.loading,
        status.waiting_tokens,
        status.total_blocks - status.free_blocks,
        status.total_blocks,
        status.cached_blocks,
        status.held_blocks,
        status.transfers,
        counters.transfer_bytes_sent,
        counters.transfer_bytes_received,
        counters.preemptions,
        counters.output_tokens,
        counters.prompt_tokens_computed,
        member.rates.step_s or 0.0,
        [(tier.name, tier.used_bytes, tier.total_bytes) for tier in status.tiers],
    )
