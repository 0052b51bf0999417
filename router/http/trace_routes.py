"""GET /traces and /traces/{request_id}: where keys are set, a tenant's own, and for an operator everybody's."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tandem.router.http.gate import exchange_of
from tandem.router.http.respond import send_json
from tandem.router.http.services import Services
from tandem.wire.errors import RequestError


class UnknownTrace(RequestError):
    code = "trace_not_found"
    http_status = 404


def _whose(scope: Scope) -> str | None:
    """The tenant whose traces may be seen. None: everybody's."""
    tenant = exchange_of(scope).tenant
    return None if tenant is None or tenant.is_operator else tenant.name


class TracesRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._services.traces.list(_whose(scope)))


class TraceRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["request_id"]
        record = self._services.traces.find(name, _whose(scope))
        if record is None:
            raise UnknownTrace(
                f"no trace of {name[:200]!r} here: a request is traced when it has the header x-tandem-trace: 1 or "
                f"a sampled traceparent, and the last {self._services.config.tracing.keep} are kept"
            )
        await send_json(send, record)
