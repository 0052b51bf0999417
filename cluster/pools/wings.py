"""What a controller can do beside keeping its pools as ordered. It knows each by its row here and never imports it: where such a folder was
deleted, the pools are kept all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wings

if TYPE_CHECKING:
    from tandem.base.tasks import Tasks
    from tandem.cluster.config import TandemConfig
    from tandem.cluster.control import CoresView, Expectation, ForesightView
    from tandem.cluster.pools.reconciler import Reconciler
    from tandem.cluster.pools.state import ClusterState
    from tandem.cluster.tasks import Clock
    from tandem.wire.nodes import Role

ROWS = (
    "tandem.cluster.pools.autoscaling.wing",
    "tandem.cluster.pools.rollouts.wing",
    "tandem.cluster.pools.gpu_health.wing",
    "tandem.cluster.adapters.changes",
    "tandem.cluster.pools.foresight.wing",
)


class ChangeAdapters(Protocol):
    """See `cluster.orders.Adapters`."""

    def __call__(self, load: Mapping[str, str], unload: Sequence[str]) -> Coroutine[Any, Any, dict[str, str]]: ...


async def _refused(load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]:
    raise ConfigurationError("adapters cannot change while this installation serves: name them in model.adapters")


class Foresight(Protocol):
    """Says what changes of sizes are expected to bring, and grades it."""

    def view(self) -> ForesightView: ...

    async def foretell(self, wanted: Mapping[Role, int]) -> Expectation:
        """Takes seconds."""

    def cores(self, wanted: Mapping[Role, int]) -> CoresView: ...

    def changes(self, new: ClusterState, *, by_load: bool) -> None:
        """The cluster is about to become this, which may have other sizes. What that brings is foretold beside it, unless it was just now,
        and graded."""


@dataclass
class Joints:
    """What wings of a controller stand on, and where they join it."""

    pools: Reconciler
    clock: Clock
    tasks: Tasks
    resize: Callable[[Mapping[Role, int]], Awaitable[None]]  # orders other sizes; requires `writing`
    # The pools are looked after, or a configuration was applied: work in the background may begin. Idempotent
    begin: list[Callable[[], None]] = field(default_factory=list)
    # The configuration that the operator wants from now on
    configured: list[Callable[[TandemConfig], None]] = field(default_factory=list)
    # A pool was resized, or what is paused has changed: what was measured before describes another deployment
    changed: list[Callable[[], None]] = field(default_factory=list)
    # Carries out the recorded rollout, and ends with it; None: what needs one is refused
    roll_out: Callable[[], Coroutine[Any, Any, None]] | None = None
    adapters: ChangeAdapters = _refused
    foresight: Foresight | None = None  # None: nothing is foretold


class PoolsWing(Protocol):
    def join(self, joints: Joints) -> None: ...


def join_wings(joints: Joints) -> None:
    for module in find_wings(ROWS):
        cast("PoolsWing", module).join(joints)
