"""W3C trace context (https://www.w3.org/TR/trace-context/): whose child a request is."""

from __future__ import annotations

import re
import secrets

import msgspec

# A later version may append fields, which are not ours to read; version ff is none.
_PARENT = re.compile(rb"^(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
_SAMPLED = 0x01
_MAX_STATE_BYTES = 512  # which everybody must carry on; of more, nobody need carry anything


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
