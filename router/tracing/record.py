"""A trace as it is shown and exported, and the W3C trace context (https://www.w3.org/TR/trace-context/) of a
request. All times are on the router's clock, whichever process measured them."""

from __future__ import annotations

import re
import secrets

import msgspec

from tandem.router.policy.choose import Alternative
from tandem.wire.tracing import Span, TransferRecord


class NodePart(msgspec.Struct, frozen=True):
    """What one node did in one attempt."""

    node_id: str
    role: str
    request_id: str  # the attempt's id, as in the nodes' logs
    spans: list[Span]
    clock_offset_s: float  # what was subtracted from the node's own times
    # How wrong that may be. None: the offset is unknown, and nothing was subtracted.
    clock_error_s: float | None
    dropped: int = 0
    transfer: TransferRecord | None = None  # the transfer of its KV, to or from this node


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
    missing: list[str]  # nodes that took part and have not reported
    dropped: int = 0  # how many of the router's spans and arrivals exceeded the limit and were dropped
    # at the first decision: the chosen nodes, and the best of the others
    alternatives: list[Alternative] = []
    max_tokens: int | None = None  # None before the request is parsed, and for vectors
    temperature: float | None = None
    finish_reasons: list[str] = []  # of its sequences, in the order in which they ended


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


class TraceList(msgspec.Struct, frozen=True, omit_defaults=True):
    """The latest first."""

    traces: list[TraceSummary]
    silent: list[str] = []  # router processes on the same port that did not answer


# A later version may append fields, which are ignored. Version ff is invalid.
_PARENT = re.compile(rb"^(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
_SAMPLED = 0x01
_MAX_STATE_BYTES = 512  # every hop must pass on this much; a longer state may be dropped as a whole


class TraceContext(msgspec.Struct, frozen=True):
    trace_id: str
    parent_id: str | None = None  # the caller's span; None: the trace begins here
    sampled: bool = False
    state: str = ""  # other vendors' fields, passed on unread

    @classmethod
    def new(cls) -> TraceContext:
        return cls(secrets.token_hex(16), sampled=True)


def parse_context(parent: bytes, state: bytes = b"") -> TraceContext | None:
    """Parses a trace context. Returns None for an invalid one, which the standard says to ignore."""
    match = _PARENT.match(parent.strip())
    if match is None:
        return None
    version, trace_id, parent_id, flags = (match[group].decode("ascii") for group in (1, 2, 3, 4))
    more = match[5] is not None
    if not int(trace_id, 16) or not int(parent_id, 16) or (version == "00" and more):
        return None
    carried = state.decode("latin-1").strip() if len(state) <= _MAX_STATE_BYTES else ""
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & _SAMPLED), carried)
