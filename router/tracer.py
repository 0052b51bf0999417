"""Where a request's time went, as the rest of the router notes it."""

from __future__ import annotations

from typing import Protocol

from tandem.api.sequence import TraceNotes
from tandem.wire.sampling import SamplingParams
from tandem.wire.tracing import ClockReading, NodeTrace

# Lets a client without a tracing system ask for one trace.
ASK_HEADER = b"x-tandem-trace"
SHORT_ID = 8  # a request is found by so many first characters of its id


class GrowingTrace(TraceNotes, Protocol):
    """One request's trace while it grows."""

    began: float
    answer_id: str

    def planned(self, prompt_tokens: int, sampling: SamplingParams | None) -> None:
        """`sampling`: None for vectors."""

    def flushed(self, now: float) -> None:
        """The text of the tokens that had arrived was written to the client, as far as they make whole
        characters."""

    def end(self, now: float, route: str, status: int | None) -> None: ...


class RequestTracer:
    """Traces no request: a wing does."""

    draws = False  # whether requests that do not ask for a trace may get one

    def begin(
        self, request_id: str, headers: list[tuple[bytes, bytes]], tenant: str | None = None
    ) -> GrowingTrace | None:
        """Begins a trace, or returns None for a request that is not traced, which then costs nothing more."""
        return None

    def on_node_trace(self, told: NodeTrace) -> None: ...

    def on_clock(self, reading: ClockReading) -> None: ...

    def on_node_left(self, node_id: str, epoch: int) -> None: ...
