"""GET /v1/models, /health, /ping, /version, /load, /metrics and /cluster; /ui, a page without figures, and its data: /ui/state and
/ui/decisions."""

from __future__ import annotations

import asyncio
import importlib.resources
from functools import cache
from typing import Any

import msgspec

from tandem.router.http.errors import Forbidden
from tandem.router.http.exchange import HttpExchange, send_bytes, send_json, send_page
from tandem.router.http.page_figures import VERSION, node_rows, page_of, page_of_all, state_of
from tandem.router.http.rendering import SharedRendering
from tandem.router.http.services import Services
from tandem.router.member import Member
from tandem.router.metrics import CONTENT_TYPE
from tandem.wire.endpoints import shown


def _model_card(services: Services, name: str) -> dict[str, Any]:
    model = services.model
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "root": model.names[0],
        "parent": None if name in model.names else model.names[0],
        "max_model_len": model.max_model_len,
    }


async def models(services: Services, exchange: HttpExchange) -> None:
    cards = [_model_card(services, name) for name in (*services.model.names, *sorted(services.model.adapters))]
    cards += [
        {"id": name, "object": "model", "created": services.model.created, "owned_by": "tandem", "root": name}
        for name in services.config.other_models
    ]
    await send_json(exchange.send, {"object": "list", "data": cards})


async def model(services: Services, exchange: HttpExchange) -> None:
    name = exchange.scope["path_params"]["model"]
    services.model.check_name(name)
    await send_json(exchange.send, _model_card(services, name))


async def health(services: Services, exchange: HttpExchange) -> None:
    """Answers 200 when a request would be served now, and 503 with the reason otherwise."""
    reason = services.why_unhealthy()
    if reason is None:
        await send_json(exchange.send, {"status": "ok"})
    else:
        await send_json(
            exchange.send, {"status": "unavailable", "reason": reason}, status=503, headers=[(b"retry-after", b"1")]
        )


async def version(services: Services, exchange: HttpExchange) -> None:
    await send_json(exchange.send, {"version": VERSION})


async def load(services: Services, exchange: HttpExchange) -> None:
    """Answers with the number of requests in all router processes on this port, in the form of vLLM's
    servers, for load balancers."""
    router = (await page_of_all(services)).router
    await send_json(exchange.send, {"server_load": router.running + router.queued})


async def metrics(rendering: SharedRendering, services: Services, exchange: HttpExchange) -> None:
    await send_bytes(exchange.send, await rendering.get(), CONTENT_TYPE.encode())


async def render_metrics(services: Services) -> bytes:
    of_all = await services.all_figures()
    # In a thread, because with a thousand nodes it takes a good part of a second. The event loop gets turns
    # meanwhile, but no more than half of the interpreter's time.
    return await asyncio.to_thread(services.metrics.render, of_all)


async def cluster(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    page = await page_of_all(services)
    await send_json(
        exchange.send,
        {
            "router": page.router,
            "pools": page.pools,
            "nodes": [_node(services, member) for member in services.pool.members],
        },
    )


_REPORTED = (
    "free_blocks", "total_blocks", "running", "waiting", "waiting_tokens", "transfers", "held_blocks",
    "quarantined_blocks", "pinned_blocks", "pinned_requests", "left_out", "step_age_s", "detail", "slower",
)  # fmt: skip


def _node(services: Services, member: Member) -> dict[str, Any]:
    info, status = member.info, member.reported
    node: dict[str, Any] = {
        "node_id": info.node_id,
        "role": info.role,
        "incarnation": info.incarnation,
        "wire_version": info.wire_version,
        "model": info.model,
        "request_endpoint": shown(info.request_endpoint),
        "peer_endpoint": shown(info.peer_endpoint),
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "tensor_parallel": info.tensor_parallel,
        "pipeline_parallel": info.pipeline_parallel,
        "context_parallel": info.context_parallel,
        "start_s": info.start_s,
        "state": state_of(member),
        "unusable": services.pool.unusable(member),
        "prefill_tokens_per_s": member.rates.prefill_tokens_per_s,
        "step_s": member.rates.step_s,
    }
    if status is not None and member.status_at is not None:
        now = services.pool.now()
        node["status_age_s"] = round(now - member.status_at, 3)
        node.update((name, getattr(status, name)) for name in _REPORTED)
        node["tiers"] = msgspec.to_builtins(status.tiers)
        node["sick"] = msgspec.to_builtins(status.sick)
        node["memory"] = msgspec.to_builtins(status.memory)
        node["counters"] = member.counters.in_full()
        node["counters_age_s"] = round(now - member.counters_at, 3) if member.counters_at is not None else None
    return node


def recalled(services: Services) -> bytes:
    """What this process alone knows of its last requests, and what the nodes have learnt."""
    nodes = [_node(services, member) for member in services.pool.members]
    return msgspec.json.encode({"page": page_of(services), "nodes": nodes})


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
    shown = msgspec.structs.replace(page, nodes=node_rows(services))
    await send_json(exchange.send, shown, headers=_NO_STORE)


async def decisions(services: Services, exchange: HttpExchange) -> None:
    """What the controller decided, and why. Without keys only for users of the router's own machine."""
    exchange.require_operator(services.keys)
    if not services.tells_decisions or services.control is None:
        raise Forbidden("the controller's decisions need an operator's key, or a router that listens on loopback alone")
    view = msgspec.json.decode(await services.control.act("view", b"{}"), type=DecidedView)
    answer = {"decisions": view.decisions, "may_act": services.keys.required}
    await send_json(exchange.send, answer, headers=_NO_STORE)
