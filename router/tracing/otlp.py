"""A trace as OpenTelemetry's protocol has it, in its JSON form (https://opentelemetry.io/docs/specs/otlp/).

The request is one span, a child of the caller's; the router's phases and each node's part are below it. Steps that
follow one another are one span: an answer of a thousand tokens is not two thousand spans.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.wire.tracing import Phase, Span, TransferRecord

_INTERNAL, _SERVER = 1, 2
_ERROR = 2
# What `decode` and `prefill` say already, or what lasts too short to be looked at one by one.
_FOLDED = frozenset({Phase.DECODE, Phase.FLUSH})
_HIDDEN = frozenset({Phase.STEP})

Json = dict[str, Any]


def export_request(records: Sequence[TraceRecord], service_name: str) -> Json:
    """The body of one POST to /v1/traces."""
    resources: list[Json] = []
    for record in records:
        clock = _Clock(record)
        resources.append(_resource(service_name, "router", "router", _router_spans(record, clock)))
        for part in record.nodes:
            spans = _node_spans(record, part, clock)
            resources.append(_resource(service_name, part.node_id, part.role, spans))
    return {"resourceSpans": resources}


class _Clock:
    """From the router's monotonic clock to the time of day, in the nanoseconds that OTLP wants, as text."""

    def __init__(self, record: TraceRecord) -> None:
        self._began, self._began_unix_s = record.began, record.began_unix_s

    def nanos(self, at: float) -> str:
        return str(round(self._began_unix_s * 1e6) * 1000 + round((at - self._began) * 1e9))


def _resource(service_name: str, instance: str, role: str, spans: list[Json]) -> Json:
    about = {"service.name": service_name, "service.instance.id": instance, "tandem.role": role}
    return {
        "resource": {"attributes": _attributes(about)},
        "scopeSpans": [{"scope": {"name": "tandem"}, "spans": spans}],
    }


def _router_spans(record: TraceRecord, clock: _Clock) -> list[Json]:
    ended = record.ended if record.ended is not None else record.began
    about: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": record.route,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "tandem.request_id": record.request_id,
        "tandem.decision": "; ".join(record.decisions),
    }
    if record.answer_id:
        about["gen_ai.response.id"] = record.answer_id
    if record.status is not None:
        about["http.response.status_code"] = record.status
    if record.arrivals:
        about["gen_ai.server.time_to_first_token"] = record.arrivals[0].at - record.began
    if record.missing:
        about["tandem.missing"] = ", ".join(record.missing)
    root = _span(
        record, record.span_id, record.parent_id, f"POST {record.route}", record.began, ended, about, clock
    )
    root["kind"] = _SERVER
    if record.status is None or record.status >= 500:
        root["status"] = {"code": _ERROR}
    return [root, *_children(record, record.span_id, record.router, clock)]


def _node_spans(record: TraceRecord, part: NodePart, clock: _Clock) -> list[Json]:
    if not part.spans:
        return []
    about: dict[str, Any] = {"tandem.node_request_id": part.request_id}
    if part.clock_error_s is not None:
        about["tandem.clock_error_s"] = part.clock_error_s
    if part.transfer is not None:
        about |= _transfer_attributes(part.transfer)
    own = _new_id()
    began, ended = min(span.start for span in part.spans), max(span.end for span in part.spans)
    whole = _span(record, own, record.span_id, part.node_id, began, ended, about, clock)
    return [whole, *_children(record, own, part.spans, clock)]


def _transfer_attributes(transfer: TransferRecord) -> dict[str, Any]:
    about: dict[str, Any] = {
        "outcome": transfer.outcome,
        "bytes": transfer.num_bytes,
        "blocks": transfer.blocks,
        "descriptors": transfer.descriptors,
        "bytes_overlapped": transfer.bytes_overlapped,
        **{f"{stage}_s": seconds for stage, seconds in transfer.waits().items()},
    }
    return {f"tandem.transfer.{name}": value for name, value in about.items()}


def _children(record: TraceRecord, parent: str, spans: Iterable[Span], clock: _Clock) -> list[Json]:
    found: list[Json] = []
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
            began, ended = group[0].start, max(span.end for span in group)
            found.append(_span(record, _new_id(), parent, phase.value, began, ended, about, clock))
    return found


def _span(
    record: TraceRecord,
    span_id: str,
    parent: str | None,
    name: str,
    began: float,
    ended: float,
    about: dict[str, Any],
    clock: _Clock,
) -> Json:
    span: Json = {
        "traceId": record.trace_id,
        "spanId": span_id,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": clock.nanos(began),
        "endTimeUnixNano": clock.nanos(ended),
        "attributes": _attributes(about),
    }
    if parent is not None:
        span["parentSpanId"] = parent
    if record.trace_state:
        span["traceState"] = record.trace_state
    return span


def _attributes(values: dict[str, Any]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Json:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _new_id() -> str:
    return secrets.token_hex(8)
