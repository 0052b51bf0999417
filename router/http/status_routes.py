"""GET /v1/models, /health, /ping, /version, /load, /metrics and /cluster; /traces, of which a tenant sees its own."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any

import msgspec

from tandem.router.http.exchange import HttpExchange
from tandem.router.http.respond import send_bytes, send_json
from tandem.router.http.services import Services
from tandem.router.metrics import CONTENT_TYPE
from tandem.router.pool import Member
from tandem.wire.endpoints import shown
from tandem.wire.errors import RequestError

VERSION = importlib.metadata.version("tandem-serve")


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
    await send_json(exchange.send, {"object": "list", "data": cards})


async def model(services: Services, exchange: HttpExchange) -> None:
    name = exchange.scope["path_params"]["model"]
    services.model.check_name(name)
    await send_json(exchange.send, _model_card(services, name))


async def health(services: Services, exchange: HttpExchange) -> None:
    """200 when a request would be served now; 503 with the reason when not."""
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
    """Requests that this router is working on, as vLLM's servers count them for load balancers."""
    dispatcher = services.dispatcher
    await send_json(exchange.send, {"server_load": dispatcher.running + dispatcher.queued})


async def metrics(services: Services, exchange: HttpExchange) -> None:
    # Beside the loop: of a thousand nodes it is a good part of a second.
    text = await asyncio.to_thread(services.metrics.render)
    await send_bytes(exchange.send, text, CONTENT_TYPE.encode())


def _whose(exchange: HttpExchange) -> str | None:
    """The tenant whose traces may be seen. None: all of them."""
    tenant = exchange.tenant
    return None if tenant is None or tenant.is_operator else tenant.name


async def traces(services: Services, exchange: HttpExchange) -> None:
    await send_json(exchange.send, services.traces.list(_whose(exchange)))


async def trace(services: Services, exchange: HttpExchange) -> None:
    name = exchange.scope["path_params"]["request_id"]
    record = services.traces.find(name, _whose(exchange))
    if record is None:
        raise UnknownTrace(
            f"no trace of {name[:200]!r} here: a request is traced when it has the header x-tandem-trace: 1 or "
            f"a sampled traceparent, and the last {services.config.tracing.keep} are kept"
        )
    await send_json(exchange.send, record)


async def cluster(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    admission = services.dispatcher.admission
    await send_json(
        exchange.send,
        {
            "router": {
                "model": services.config.model_name,
                "policy": services.config.policy,
                "local_prefill": services.config.local_prefill,
                "draining": services.draining,
                "paused": sorted(services.pool.paused),
                "running": services.dispatcher.running,
                "queued": admission.queued,
                "queue_limit": services.config.limits.queued,
                "places_held": admission.held,
                "handover_s": services.pool.handover.value,
                "unhealthy": services.why_unhealthy(),
                "inbox": shown(services.links.endpoint),
            },
            "nodes": [_node(services, member) for member in services.pool.members],
        },
    )


def _node(services: Services, member: Member) -> dict[str, Any]:
    info, status = member.info, member.status
    node: dict[str, Any] = {
        "node_id": info.node_id,
        "role": info.role,
        "incarnation": info.incarnation,
        "model": info.model,
        "request_endpoint": shown(info.request_endpoint),
        "peer_endpoint": shown(info.peer_endpoint),
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "state": "lost" if member.lost else "unknown" if status is None else status.state,
        "unusable": services.pool.unusable(member),
        "prefill_tokens_per_s": member.meter.rates.prefill_tokens_per_s,
        "step_s": member.meter.rates.step_s,
    }
    if status is not None:
        node.update(
            status_age_s=round(services.pool.now() - member.status_at, 3),
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            running=status.running,
            waiting=status.waiting,
            waiting_tokens=status.waiting_tokens,
            transfers=status.transfers,
            held_blocks=status.held_blocks,
            quarantined_blocks=status.quarantined_blocks,
            pinned_blocks=status.pinned_blocks,
            pinned_requests=status.pinned_requests,
            left_out=status.left_out,
            step_age_s=status.step_age_s,
            detail=status.detail,
            tiers=msgspec.to_builtins(status.tiers),
            counters=msgspec.to_builtins(status.counters),
        )
    return node
