"""What a node may do besides its requests. Each is a wing: a folder of this room that can be deleted, known by its row here.

Such a module has `make`, which returns its part of a node's service, or None where the node's settings and model do not ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tandem.base.errors import TandemError
from tandem.base.wings import find_wings
from tandem.engine.core import Engine
from tandem.engine.request import Request
from tandem.node.config import NodeConfig
from tandem.wire.kv_events import KVEvent
from tandem.wire.requests import Submit

ROWS = (
    "tandem.node.grammar.part",
    "tandem.node.encoders.part",
    "tandem.node.kv_events.part",
    "tandem.node.step_trace.part",
)

Publish = Callable[[Sequence[KVEvent]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContext:
    config: NodeConfig
    engine: Engine
    in_step: Callable[
        [Callable[[], None]], None
    ]  # from any thread: calls it in the step thread, between two steps
    fail: Callable[[str, TandemError], None]  # ends a live request with this error
    clock: Callable[[], float] = time.monotonic


class ServicePart:
    """The step thread calls it, unless a method says otherwise. None of its methods may wait."""

    publish: Publish | None = None
    """Gets the events of the KV cache, in the `cache-news` thread."""

    def prepare(self, request: Request) -> None:
        """Before the engine gets the request. A TandemError refuses it."""

    def admitted(self, request: Request, submit: Submit, now: float) -> None:
        """The engine has taken the request."""

    def forget(self, request_id: str) -> None:
        """The request was ended from outside."""

    def before_step(self, now: float) -> None: ...

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until `before_step` next has something to do; None: never."""

    def counters(self) -> Mapping[str, Any]:
        """Fields of NodeCounters. Called from any thread."""
        return {}

    def stop(self) -> None:
        """Called once, when no step runs any more, from another thread."""


class NodeWing(Protocol):
    def make(self, context: PartContext) -> ServicePart | None:
        """Called before the first step. Raises ConfigurationError."""
        ...


def wings() -> list[NodeWing]:
    return [cast("NodeWing", module) for module in find_wings(ROWS)]
