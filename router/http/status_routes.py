"""GET /v1/models, /health, /ping, /version, /load, /metrics and /cluster."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from tandem.router.http.gate import require_operator
from tandem.router.http.respond import send_bytes, send_json
from tandem.router.http.services import Services
from tandem.router.metrics import CONTENT_TYPE
from tandem.router.pool import Member
from tandem.wire.errors import UnknownModel

VERSION = importlib.metadata.version("tandem-serve")


def _model_card(services: Services, name: str) -> dict[str, Any]:
    model = services.model
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
    }


class ModelsRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cards = [_model_card(self._services, name) for name in self._services.model.names]
        await send_json(send, {"object": "list", "data": cards})


class ModelRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"]
        if name not in self._services.model.names:
            raise UnknownModel(f"the model {name[:200]!r} does not exist")
        await send_json(send, _model_card(self._services, name))


class HealthRoute:
    """200 when a request would be served now; 503 with the reason when not."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._services.why_unhealthy()
        if reason is None:
            await send_json(send, {"status": "ok"})
        else:
            await send_json(
                send,
                {"status": "unavailable", "reason": reason},
                status=503,
                headers=[(b"retry-after", b"1")],
            )


class VersionRoute:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"version": VERSION})


class LoadRoute:
    """Requests that this router is working on, as vLLM's servers count them for whoever balances load."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dispatcher = self._services.dispatcher
        await send_json(send, {"server_load": dispatcher.running + dispatcher.admission.queued})


class MetricsRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, self._services.metrics.render(), CONTENT_TYPE.encode())


class ClusterRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        require_operator(scope, services.keys)
        admission = services.dispatcher.admission
        await send_json(
            send,
            {
                "router": {
                    "model": services.config.model_name,
                    "policy": services.config.policy,
                    "local_prefill": services.config.local_prefill,
                    "draining": services.draining,
                    "running": services.dispatcher.running,
                    "queued": admission.queued,
                    "queue_limit": services.config.limits.queued,
                    "places_held": admission.held,
                    "handover_s": services.pool.handover.value,
                    "unhealthy": services.why_unhealthy(),
                    "inbox": services.links.endpoint,
                },
                "nodes": [self._node(member) for member in services.pool.members],
            },
        )

    def _node(self, member: Member) -> dict[str, Any]:
        info, status = member.info, member.status
        node: dict[str, Any] = {
            "node_id": info.node_id,
            "role": info.role,
            "incarnation": info.incarnation,
            "model": info.model,
            "request_endpoint": info.request_endpoint,
            "peer_endpoint": info.peer_endpoint,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "state": "lost" if member.lost else "unknown" if status is None else status.state,
            "unusable": self._services.pool.unusable(member),
            "prefill_tokens_per_s": member.meter.rates.prefill_tokens_per_s,
            "step_s": member.meter.rates.step_s,
        }
        if status is not None:
            node.update(
                status_age_s=round(self._services.pool.now() - member.status_at, 3),
                free_blocks=status.free_blocks,
                total_blocks=status.total_blocks,
                running=status.running,
                waiting=status.waiting,
                waiting_tokens=status.waiting_tokens,
                transfers=status.transfers,
                held_blocks=status.held_blocks,
                quarantined_blocks=status.quarantined_blocks,
                step_age_s=status.step_age_s,
                detail=status.detail,
                counters=msgspec.to_builtins(status.counters),
            )
        return node
