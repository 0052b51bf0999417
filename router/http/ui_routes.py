"""GET /ui, the cluster's page, /ui/state, its data, small enough to be asked for every second, and
/ui/decisions, what the controller decided.

The page itself holds no figures. Its data needs an operator's key where keys are set, as /cluster does.
"""

from __future__ import annotations

import importlib.resources
from functools import cache
from typing import Any

import msgspec

from tandem.router.http.errors import Forbidden
from tandem.router.http.exchange import HttpExchange, send_json, send_page
from tandem.router.http.page_figures import page_of_all
from tandem.router.http.services import Services
from tandem.router.member import Member
from tandem.router.page_state import NodeRow, PoolRow
from tandem.wire.requests import NodeStatus

_NO_STORE = ((b"cache-control", b"no-store"),)


class DecidedView(msgspec.Struct, frozen=True):
    """What is read of the controller's view."""

    decisions: list[dict[str, Any]]


@cache
def _page() -> bytes:
    return importlib.resources.files(__package__).joinpath("ui.html").read_bytes()


async def page(services: Services, exchange: HttpExchange) -> None:
    await send_page(exchange.send, _page())


async def state(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    page = await page_of_all(services)
    pool = services.pool
    nodes = [_row(services, member) for member in pool.members]
    nodes += [NodeRow(name, role.value, state, why or state) for name, role, state, why in pool.absent()]
    ready = pool.ready_by_role()
    pools = [
        PoolRow(one.role.value, one.wanted, ready[one.role], one.starting, one.waiting)
        for one in pool.reports
        if one.wanted or ready[one.role]
    ]
    await send_json(exchange.send, msgspec.structs.replace(page, nodes=nodes, pools=pools), headers=_NO_STORE)


async def decisions(services: Services, exchange: HttpExchange) -> None:
    """What the controller decided, and why. Without keys only for users of the router's own machine."""
    exchange.require_operator(services.keys)
    if not services.tells_decisions or services.control is None:
        raise Forbidden(
            "the controller's decisions need an operator's key, or a router that listens on loopback alone"
        )
    view = msgspec.json.decode(await services.control.act("view", b"{}"), type=DecidedView)
    answer = {"decisions": view.decisions, "may_act": services.keys.required}
    await send_json(exchange.send, answer, headers=_NO_STORE)


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
        why,
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
        _notes(status),
    )


def _notes(status: NodeStatus) -> list[str]:
    notes = [note for note in (status.detail, status.slower) if note]
    notes += [f"{each.device}: {each.why}" for each in status.sick]
    notes += [f"its {tier.name} tier is left out: {tier.left_out}" for tier in status.tiers if tier.left_out]
    notes += [f"takes nothing from {sender}: its KV arrived wrong here" for sender in status.left_out]
    return notes
