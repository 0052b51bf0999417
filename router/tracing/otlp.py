"""Sends traces to OpenTelemetry's collector through its SDK, which batches, retries and reads the `OTEL_*`
variables.

A request is one span, a child of the caller's; below it are the router's phases and each node's part.
Consecutive steps are joined into one span, so an answer of a thousand tokens is not two thousand spans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tandem.router.config import TracingConfig
from tandem.router.metrics import RouterMetrics
from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.wire.tracing import Span, TracePhase, TransferRecord

logger = logging.getLogger(__name__)

CLOSE_WITHIN_S = 2.0
QUEUED_SPANS = 1 << 14  # unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise
# Shorter than `decode` and `prefill`, which contain them or say the same.
_FOLDED = frozenset({TracePhase.DECODE, TracePhase.FLUSH})
_HIDDEN = frozenset({TracePhase.STEP})


class OtlpExporter:
    """Exports traces. `offer` never waits, because the SDK sends from its own thread: a slow collector costs
    traces, but never delays requests."""

    def __init__(self, config: TracingConfig, metrics: RouterMetrics, environ: Mapping[str, str] = os.environ) -> None:
        base = config.otlp_endpoint.rstrip("/")
        url = base if not base or base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._sender = _CountedSender(OTLPSpanExporter(url or None), metrics)
        self._metrics = metrics
        self._service = environ.get("OTEL_SERVICE_NAME") or "tandem"
        self._room = int(environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or QUEUED_SPANS)
        self._processor = BatchSpanProcessor(self._sender, max_queue_size=self._room)

    def offer(self, record: TraceRecord) -> None:
        spans = spans_of(record, self._service)
        # The SDK would drop single spans without counting them; a trace is kept or dropped as a whole.
        if self._sender.queued + len(spans) > self._room:
            self._metrics.traces_dropped.inc("queue_full")
            return
        self._sender.queued += len(spans)
        for span in spans:
            self._processor.on_end(span)

    async def close(self) -> None:
        """Sends what is queued, within a deadline."""
        flushed = asyncio.create_task(asyncio.to_thread(self._processor.force_flush))
        await asyncio.wait([flushed], timeout=CLOSE_WITHIN_S)
        self._sender.shutdown()  # ends a running retry
        await asyncio.to_thread(self._processor.shutdown)


class _CountedSender(SpanExporter):  # type: ignore[misc]
    """Counts whole traces by their one span of kind SERVER."""

    def __init__(self, sender: OTLPSpanExporter, metrics: RouterMetrics) -> None:
        self._sender = sender
        self._metrics = metrics
        self._complained = False
        self._ended = False
        self.queued = 0  # spans offered and not yet exported

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self._ended else self._sender.export(spans)
        traces = sum(span.kind is SpanKind.SERVER for span in spans)
        self.queued -= len(spans)
        if result is SpanExportResult.SUCCESS:
            self._metrics.traces_exported.inc(count=traces)
            self._complained = False
        else:
            self._metrics.traces_dropped.inc("not_sent", count=traces)
            if not self._complained:  # once, until an export succeeds again: a collector may be away for days
                self._complained = True
                logger.warning("OpenTelemetry's collector takes no traces; they are counted as dropped")
        return result

    def shutdown(self) -> None:
        if not self._ended:
            self._ended = True
            self._sender.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def spans_of(record: TraceRecord, service: str) -> list[ReadableSpan]:
    """Returns the router's spans and then each node's. Each has its own process as its resource."""
    maker = _SpanMaker(record, Resource.create(_resource(service, "router", "router")))
    spans = _router_spans(record, maker)
    for part in record.nodes:
        node = _SpanMaker(record, Resource.create(_resource(service, part.node_id, part.role)))
        spans += _node_spans(record, part, node)
    return spans


def _resource(service: str, instance: str, role: str) -> dict[str, str]:
    return {"service.name": service, "service.instance.id": instance, "tandem.role": role}


class _SpanMaker:
    """Makes the spans of one process in one trace, with times moved from the router's monotonic clock to the
    time of day."""

    def __init__(self, record: TraceRecord, resource: Resource) -> None:
        self._record = record
        self._resource = resource
        self._state = TraceState.from_header([record.trace_state]) if record.trace_state else TraceState()

    def context(self, span_id: str) -> SpanContext:
        return SpanContext(
            int(self._record.trace_id, 16),
            int(span_id, 16),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
            trace_state=self._state,
        )

    def span(
        self,
        name: str,
        span_id: str,
        parent: str | None,
        began: float,
        ended: float,
        about: dict[str, Any],
        *,
        kind: SpanKind | None = None,
        failed: bool = False,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=self.context(span_id),
            parent=self.context(parent) if parent is not None else None,
            resource=self._resource,
            attributes=about,
            kind=SpanKind.INTERNAL if kind is None else kind,
            status=Status(StatusCode.ERROR) if failed else Status(),
            start_time=self._nanos(began),
            end_time=self._nanos(ended),
            instrumentation_scope=InstrumentationScope("tandem"),
        )

    def _nanos(self, at: float) -> int:
        record = self._record
        return round(record.began_unix_s * 1e6) * 1000 + round((at - record.began) * 1e9)


def _router_spans(record: TraceRecord, make: _SpanMaker) -> list[ReadableSpan]:
    about: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": record.route,
        "gen_ai.operation.name": _operation(record.route),
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "tandem.request_id": record.request_id,
        "tandem.decision": "; ".join(record.decisions),
    }
    if record.max_tokens is not None:
        about["gen_ai.request.max_tokens"] = record.max_tokens
    if record.temperature is not None:
        about["gen_ai.request.temperature"] = record.temperature
    if record.finish_reasons:
        about["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.answer_id:
        about["gen_ai.response.id"] = record.answer_id
    if record.status is not None:
        about["http.response.status_code"] = record.status
    if record.arrivals:
        about["tandem.time_to_first_token_s"] = record.arrivals[0].at - record.began
    if record.missing:
        about["tandem.missing"] = ", ".join(record.missing)
    root = make.span(
        f"POST {record.route}",
        record.span_id,
        record.parent_id,
        record.began,
        record.ended if record.ended is not None else record.began,
        about,
        kind=SpanKind.SERVER,
        failed=record.status is None or record.status >= 500,
    )
    return [root, *_children(record.span_id, record.router, make)]


def _operation(route: str) -> str:
    """OpenTelemetry's name for what a request asks."""
    if route.endswith(("/embeddings", "/score", "/rerank")):
        return "embeddings"
    return "text_completion" if route == "/v1/completions" else "chat"


def _node_spans(record: TraceRecord, part: NodePart, make: _SpanMaker) -> list[ReadableSpan]:
    if not part.spans:
        return []
    about: dict[str, Any] = {"tandem.node_request_id": part.request_id}
    if part.clock_error_s is not None:
        about["tandem.clock_error_s"] = part.clock_error_s
    if part.transfer is not None:
        about |= _transfer_attributes(part.transfer)
    own = _new_id()
    began, ended = min(span.start for span in part.spans), max(span.end for span in part.spans)
    whole = make.span(part.node_id, own, record.span_id, began, ended, about)
    return [whole, *_children(own, part.spans, make)]


def _transfer_attributes(transfer: TransferRecord) -> dict[str, Any]:
    about: dict[str, Any] = {
        "outcome": transfer.outcome,
        "bytes": transfer.num_bytes,
        "blocks": transfer.blocks,
        "descriptors": transfer.descriptors,
        "bytes_overlapped": transfer.bytes_overlapped,
        **{f"{stage}_s": seconds for stage, seconds in transfer.waits.items()},
    }
    return {f"tandem.transfer.{name}": value for name, value in about.items()}


def _children(parent: str, spans: Iterable[Span], make: _SpanMaker) -> list[ReadableSpan]:
    found: list[ReadableSpan] = []
    shown = sorted((span for span in spans if span.phase not in _HIDDEN), key=lambda span: span.start)
    for phase, run in groupby(shown, key=lambda span: span.phase):
        together = list(run)
        for group in [together] if phase in _FOLDED else [[span] for span in together]:
            about: dict[str, Any] = {"tandem.tokens": sum(span.tokens for span in group)}
            if len(group) > 1:
                about["tandem.steps"] = len(group)
                about["tandem.longest_s"] = max(span.seconds for span in group)
            if moved := sum(span.num_bytes for span in group):
                about["tandem.bytes"] = moved
            ended = max(span.end for span in group)
            found.append(make.span(phase.value, _new_id(), parent, group[0].start, ended, about))
    return found


def _new_id() -> str:
    return secrets.token_hex(8)
