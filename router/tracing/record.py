"""A trace as it is shown and exported. Every time is on the router's clock, whoever measured it."""

from __future__ import annotations

import msgspec

from tandem.wire.tracing import Span, TransferRecord


class NodePart(msgspec.Struct, frozen=True):
    """What one node did in one attempt."""

    node_id: str
    role: str
    request_id: str  # the attempt's, as the nodes' logs name it
    spans: list[Span]
    clock_offset_s: float  # what was taken off the node's own times
    clock_error_s: float | None  # how wrong that may be; None: nothing is known, and nothing was taken off
    dropped: int = 0
    transfer: TransferRecord | None = None  # of its KV, to or from this node


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Tokens reached the router."""

    at: float
    node_id: str
    tokens: int


class TraceRecord(msgspec.Struct, frozen=True):
    request_id: str
    answer_id: str  # the answer's `id`; "" when there was none
    trace_id: str
    span_id: str
    parent_id: str | None
    trace_state: str
    route: str
    model: str
    began: float
    began_unix_s: float
    ended: float | None  # None: it still runs
    status: int | None
    prompt_tokens: int
    output_tokens: int
    decisions: list[str]
    router: list[Span]
    arrivals: list[Arrival]
    nodes: list[NodePart]
    missing: list[str]  # nodes that took part and have not told of it
    dropped: int = 0  # the router's own spans and arrivals beyond what one request may have


class TraceSummary(msgspec.Struct, frozen=True):
    request_id: str
    answer_id: str
    trace_id: str
    route: str
    began_unix_s: float
    seconds: float | None
    status: int | None
    prompt_tokens: int
    output_tokens: int


class TraceList(msgspec.Struct, frozen=True):
    """The latest first."""

    traces: list[TraceSummary]
