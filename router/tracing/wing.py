"""GET /traces and /traces/{request_id}, the traces of all processes on the port, and their export. A tenant sees only its own."""

from __future__ import annotations

import heapq
import os
from typing import TYPE_CHECKING

import msgspec

from tandem.base.errors import ConfigurationError, RequestError
from tandem.router.config import TracingConfig
from tandem.router.http.exchange import HttpExchange, send_json
from tandem.router.http.operation import ApiOperation
from tandem.router.http.services import Services
from tandem.router.metrics import RouterMetrics
from tandem.router.tracing.record import TraceList, TraceRecord
from tandem.router.tracing.traces import Traces
from tandem.router.wings import RouteRow, RouterWing

if TYPE_CHECKING:
    from tandem.router.tracing.otlp import OtlpExporter


class UnknownTrace(RequestError):
    code = "trace_not_found"
    http_status = 404


class TraceQuestion(msgspec.Struct, frozen=True):
    name: str
    tenant: str | None  # only this tenant's traces; None for all


class FoundTrace(msgspec.Struct, frozen=True):
    record: TraceRecord | None = None


def _exporter_of(config: TracingConfig, metrics: RouterMetrics) -> OtlpExporter | None:
    """Returns None when neither the settings nor the environment name a collector. OpenTelemetry is imported
    only here."""
    named = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{what}ENDPOINT") for what in ("", "TRACES_"))
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not (config.otlp_endpoint or named):
        return None
    try:
        from tandem.router.tracing.otlp import OtlpExporter
    except ImportError as error:
        raise ConfigurationError(
            f"exporting traces needs OpenTelemetry's exporter ({error}): pip install opentelemetry-exporter-otlp-proto-http"
        ) from error
    return OtlpExporter(config, metrics)


def _whose(exchange: HttpExchange) -> str | None:
    """Returns the tenant whose traces may be seen, or None for all."""
    tenant = exchange.tenant
    return None if tenant is None or tenant.is_operator else tenant.name


class TraceWing(RouterWing):
    operations = (
        ApiOperation("get", "/traces", "The last requests that were traced", TraceList, errors=("401",)),
        ApiOperation(
            "get", "/traces/{request_id}", "Where one request's time went", TraceRecord, errors=("401", "404")
        ),
    )

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        config = services.config
        self._exporter = exporter = _exporter_of(config.tracing, services.metrics)
        export = exporter.offer if exporter is not None else None
        services.tracer = self.traces = Traces(config.tracing, config.model_name, export)
        services.siblings.answers.update(traces=self._list, trace=self._find)

    def routes(self) -> list[RouteRow]:
        return [("/traces", self._show_all, ["GET"]), ("/traces/{request_id}", self._show, ["GET"])]

    async def _list(self, body: bytes) -> TraceList:
        return self.traces.list(msgspec.msgpack.decode(body, type=str | None))

    async def _find(self, body: bytes) -> FoundTrace:
        asked = msgspec.msgpack.decode(body, type=TraceQuestion)
        return FoundTrace(self.traces.find(asked.name, asked.tenant))

    async def _show_all(self, services: Services, exchange: HttpExchange) -> None:
        whose = _whose(exchange)
        told, silent = await services.siblings.ask("traces", TraceList, whose)
        found = self.traces.list(whose).traces + [trace for one in told.values() for trace in one.traces]
        latest = heapq.nlargest(services.config.tracing.keep, found, key=lambda trace: trace.began_unix_s)
        await send_json(exchange.send, TraceList(latest, silent))

    async def _show(self, services: Services, exchange: HttpExchange) -> None:
        name = exchange.scope["path_params"]["request_id"]
        whose = _whose(exchange)
        record, silent = self.traces.find(name, whose), list[str]()
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

    async def close(self) -> None:
        self.traces.close()
        if self._exporter is not None:
            await self._exporter.close()


WING = TraceWing
