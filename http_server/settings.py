"""What a server is given by who runs it: limits, times and the form of an error."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ServerLimits(msgspec.Struct, frozen=True):
    header_bytes: int  # of one request
    connections: int  # open at once; beyond it, the longest idle gives way


class ServerTimeouts(msgspec.Struct, frozen=True):
    """In seconds."""

    header: float  # within this time a request's header must arrive
    body: float  # within this time the rest of a body must arrive, after its answer
    keep_alive: float  # an idle connection is closed after this long
    slow_reader: float  # a client that takes nothing of its answer for this long is cut off


class RefusalBody(Protocol):
    """Makes the body, JSON, of an answer that refuses what never became a request."""

    def __call__(self, message: str, status: int, code: str) -> bytes: ...
