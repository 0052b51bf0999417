"""GET /v1/models, /health, /ping, /version, /load, /metrics, /cluster and /traces. A tenant sees only its own
traces."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

import msgspec

from tandem.base.errors import RequestError
from tandem.router.http.exchange import HttpExchange, send_bytes, send_json
from tandem.router.http.page_figures import VERSION, FoundTrace, TraceQuestion, page_of_all
from tandem.router.http.rendering import SharedRendering
from tandem.router.http.services import Services
from tandem.router.metrics import CONTENT_TYPE
from tandem.router.pool import Member
from tandem.router.tracing.record import TraceList
from tandem.wire.endpoints import shown
from tandem.wire.versions import WIRE_VERSION


class UnknownTrace(RequestError):
    code = "trace_not_found"
    http_status = 404


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
    cards = [
        _model_card(services, name) for name in (*services.model.names, *sorted(services.model.adapters))
    ]
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
            exchange.send,
            {"status": "unavailable", "reason": reason},
            status=503,
            headers=[(b"retry-after", b"1")],
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


def _whose(exchange: HttpExchange) -> str | None:
    """Returns the tenant whose traces may be seen, or None for all."""
    tenant = exchange.tenant
    return None if tenant is None or tenant.is_operator else tenant.name


async def traces(services: Services, exchange: HttpExchange) -> None:
    whose = _whose(exchange)
    told, silent = await services.siblings.ask("traces", TraceList, whose)
    found = services.traces.list(whose).traces + [trace for one in told.values() for trace in one.traces]
    latest = heapq.nlargest(services.config.tracing.keep, found, key=lambda trace: trace.began_unix_s)
    await send_json(exchange.send, TraceList(latest, silent))


async def trace(services: Services, exchange: HttpExchange) -> None:
    name = exchange.scope["path_params"]["request_id"]
    whose = _whose(exchange)
    record, silent = services.traces.find(name, whose), list[str]()
    if record is None:
        told, silent = await services.siblings.ask("trace", FoundTrace, TraceQuestion(name, whose))
        record = next((one.record for one in told.values() if one.record is not None), None)
    if record is None:
        raise UnknownTrace(
            f"no trace of {name[:200]!r} here: a request is traced when it has the header x-tandem-trace: 1 or "
            f"a sampled traceparent, and the last {services.config.tracing.keep} are kept"
            + (f"; {', '.join(silent)} could not be asked" if silent else "")
        )
    await send_json(exchange.send, record)


async def cluster(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    router = (await page_of_all(services)).router
    await send_json(
        exchange.send,
        {
            "router": {
                "model": services.config.model_name,
                "policy": services.config.policy,
                "local_prefill": services.config.local_prefill,
                "draining": services.draining,
                "paused": router.paused,
                "running": router.running,
                "queued": router.queued,
                "queue_limit": router.queue_limit,
                "places_held": router.places_held,
                "handover_s": services.pool.handover.value,
                "unhealthy": router.unhealthy,
                "inbox": shown(services.links.endpoint),
                "wire_version": WIRE_VERSION,
                "processes": msgspec.to_builtins(router.processes),
            },
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
        "start_s": info.start_s,
        "state": "lost" if member.lost else "unknown" if status is None else status.state,
        "unusable": services.pool.unusable(member),
        "prefill_tokens_per_s": member.rates.prefill_tokens_per_s,
        "step_s": member.rates.step_s,
    }
    if status is not None and member.status_at is not None:
        now = services.pool.now()
        node["status_age_s"] = round(now - member.status_at, 3)
        node.update((name, getattr(status, name)) for name in _REPORTED)
        node["tiers"] = msgspec.to_builtins(status.tiers)
        node["counters"] = member.counters.in_full()
        node["counters_age_s"] = (
            round(now - member.counters_at, 3) if member.counters_at is not None else None
        )
    return node
