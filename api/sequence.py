"""One sequence that a request asks for. A plan lists them, and the router has them generated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import RequestFacts
from tandem.wire.tracing import TracePhase


class TraceNotes(Protocol):
    """Where it is noted what happens to a traced request. Plans only hand it on."""

    def span(self, phase: TracePhase, start: float, end: float, tokens: int = 0) -> None: ...
    def attempt(self, request_id: str, nodes: Iterable[NodeInfo], decision: str) -> None: ...
    def considered(self, nodes: list[Any]) -> None: ...
    def arrived(self, at: float, node_id: str, tokens: int) -> None: ...
    def finished(self, reason: str) -> None: ...


class KeptAnswer(msgspec.Struct, frozen=True):
    """The decode node keeps the answer, for any router that asks for it by this id."""

    answer_id: str
    note: bytes  # what such a router needs to turn the tokens into the answer


class SequenceSpec(msgspec.Struct, frozen=True):
    label: str  # the HTTP request's id, for logs
    facts: RequestFacts
    deadline: float  # by the dispatcher's clock
    first_by: float | None = None  # when its first token must come, by the same clock
    session: str | None = None
    trace: TraceNotes | None = None
    arrived: float | None = None  # when the HTTP request arrived; None means now
    keep: KeptAnswer | None = None
    reads_ahead: bool = False  # the first part of an arriving prompt; its one token is dropped
    # Nodes that have answered it before: it is asked again of others, to compare.
    answered_by: frozenset[str] = frozenset()

    @property
    def is_measured(self) -> bool:
        """Whether its times say how long users wait. No one waits for what runs when nothing else does."""
        return not (self.reads_ahead or self.facts.when_idle or self.answered_by)
