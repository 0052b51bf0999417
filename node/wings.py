"""What a node may do besides its requests. Each is a wing: a folder of this room that can be deleted, known by its row here.

Such a module has `make`, which returns its part of a node's service, or None where the node's settings and model do not ask for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from tandem.base.errors import ConfigurationError, TandemError
from tandem.base.progress import Report
from tandem.base.wings import find_wing, find_wings

if TYPE_CHECKING:
    from tandem.engine.contract import NodeEngine
    from tandem.engine.model.torch_runner import TorchRunner
    from tandem.engine.request import Request
    from tandem.node.config import NodeConfig
    from tandem.node.node import LoadSource
    from tandem.wire.kv_events import KVEvent
    from tandem.wire.requests import SickDevice, Submit

ROWS = (
    "tandem.node.grammar.part",
    "tandem.node.encoders.part",
    "tandem.node.kv_events.part",
    "tandem.node.step_trace.part",
    "tandem.node.step_costs.part",
    "tandem.node.canary.part",
    "tandem.node.gpu_health.part",
)
# The other ranks of a node that has several.
RANKS = "tandem.node.ranks.loading"

Publish: TypeAlias = "Callable[[Sequence[KVEvent]], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContext:
    config: NodeConfig
    engine: NodeEngine
    # Called from any thread: runs the given function in the step thread, between two steps.
    in_step: Callable[[Callable[[], None]], None]
    fail: Callable[[str, TandemError], None]  # ends a live request with this error
    clock: Callable[[], float] = time.monotonic


class ServicePart:
    """The step thread calls it, unless a method says otherwise. None of its methods may wait."""

    publish: Publish | None = None
    """Gets the events of the KV cache, in the `cache-news` thread."""

    @property
    def sick(self) -> tuple[SickDevice, ...]:
        """The node's devices that must not compute any more: the node is replaced elsewhere. Read from any thread."""
        return ()

    def prepare(self, request: Request) -> None:
        """Before the engine gets the request. A TandemError refuses it."""

    def admitted(self, request: Request, submit: Submit, now: float) -> None:
        """The engine has taken the request."""

    def forget(self, request_id: str) -> None:
        """The request was ended from outside."""

    def before_step(self, now: float) -> None: ...

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until `before_step` next has something to do; None: never."""

    def count(self, counters: dict[str, Any]) -> None:
        """Adds to the fields of NodeCounters. Called from any thread."""

    def stop(self) -> None:
        """Called once, when no step runs any more, from another thread."""


class NodeWing(Protocol):
    def make(self, context: PartContext) -> ServicePart | None:
        """Called before the first step. Raises ConfigurationError."""


class OtherRanks(Protocol):
    @property
    def transfer_lines(self) -> Sequence[socket.socket]:
        """See `ConnectorContext.rank_lines`."""

    @property
    def tier_lines(self) -> Sequence[socket.socket]:
        """See `ConnectorContext.tier_lines`."""

    def load(self) -> TorchRunner:
        """Starts the ranks, and loads all parts of the model."""

    def stop(self) -> None: ...


class RanksElsewhere(Protocol):
    """A node's ranks on one of its other machines."""

    def open(self, lead: str) -> str:
        """Admits rank 0, whose public key is `lead`, and returns the endpoint for it."""

    def hold(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the ranks to end, and returns whether they have."""

    def stop(self) -> None: ...


class RanksWing(Protocol):
    def of_first_rank(self, config: NodeConfig) -> NodeConfig:
        """The configuration of rank 0's process: with its share of the node's cores and threads."""

    def make(self, config: NodeConfig, loading: LoadSource, lost: Callable[[str], None], *, apart: bool) -> OtherRanks:
        """`lost` is called with the reason when the other ranks have been ended. `apart`: each rank keeps its KV in its own memory."""

    def keep(self, config: NodeConfig, machine: int, find_model: Callable[[str, Report], str]) -> RanksElsewhere: ...


def ranks_wing() -> RanksWing:
    if module := find_wing(RANKS):
        return cast("RanksWing", module)
    raise ConfigurationError(
        "tensor_parallel, pipeline_parallel and context_parallel must be 1: this installation has no node/ranks"
    )


def wings() -> list[NodeWing]:
    return [cast("NodeWing", module) for module in find_wings(ROWS)]
