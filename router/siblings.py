"""The other router processes on this port, as the rest of the router knows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from tandem.router.prefixes import PromptHashes
from tandem.wire.nodes import NodeInfo

T = TypeVar("T")
Answer = Callable[[bytes], Awaitable[object]]
Hearing = Callable[[str, bytes], None]


class Siblings:
    """None: this process answers for itself. A wing knows others.

    `answers`: by question, a function from the question's body to the answer. `hears`: by kind of report, a
    function of the sender's desk and the report's body. `on_change`: called when siblings came or left.
    """

    def __init__(self) -> None:
        self.desk = ""  # where siblings ask this process
        self.answers: dict[str, Answer] = {}
        self.hears: dict[str, Hearing] = {}
        self.on_change: list[Callable[[], None]] = []

    @property
    def desks(self) -> list[str]:
        return []

    @property
    def alone(self) -> bool:
        return True

    def tell(self, desks: Mapping[str, str]) -> None:
        """Sets the desks of all processes on this port by name, this one's included."""

    async def ask(self, what: str, answer: type[T], body: object = None) -> tuple[dict[str, T], list[str]]:
        """Asks all siblings. Returns their answers by name, and the names of those that did not answer."""
        return {}, []

    def report(self, what: str, news: object) -> None:
        """Tells all siblings, which do not answer."""


class SentReports(Protocol):
    """Tells siblings what this process sends to nodes."""

    def tell(self, node: NodeInfo, request_id: str, tokens: int, blocks: int, hashes: PromptHashes) -> None: ...

    def tell_answered(self, node_id: str, request_id: str) -> None:
        """A node answered a request before its status counted it."""
