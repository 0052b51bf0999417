"""A trace as it is shown and exported, and the W3C trace context (https://www.w3.org/TR/trace-context/) that a request brings.
Every time is on the router's clock, whichever process measured it."""

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
    alternatives: list[Alternative] = []  # at the first decision: the nodes that took it, and the next best


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


# A later version may append fields, which are not ours to read; version ff is none.
_PARENT = re.compile(rb"^(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
_SAMPLED = 0x01
_MAX_STATE_BYTES = 512  # which every hop must carry on; a longer one may be dropped whole


class TraceContext(msgspec.Struct, frozen=True):
    trace_id: str
    parent_id: str | None = None  # the caller's span; None: the trace begins here
    sampled: bool = False
    state: str = ""  # other vendors' words, carried on unread

    @classmethod
    def new(cls) -> TraceContext:
        return cls(secrets.token_hex(16), sampled=True)


def parse_context(parent: bytes, state: bytes = b"") -> TraceContext | None:
    """None for what is no trace context: it is ignored, as the standard asks."""
    match = _PARENT.match(parent.strip())
    if match is None:
        return None
    version, trace_id, parent_id, flags = (match[group].decode("ascii") for group in (1, 2, 3, 4))
    more = match[5] is not None
    if not int(trace_id, 16) or not int(parent_id, 16) or (version == "00" and more):
        return None
    carried = state.decode("latin-1").strip() if len(state) <= _MAX_STATE_BYTES else ""
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & _SAMPLED), carried)
