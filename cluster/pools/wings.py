"""What a controller can do beside keeping its pools as ordered. It knows each by its row here and never imports it: where such a folder was
deleted, the pools are kept all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wings

if TYPE_CHECKING:
    from tandem.base.tasks import Tasks
    from tandem.cluster.config import TandemConfig
    from tandem.cluster.pools.reconciler import Reconciler
    from tandem.cluster.tasks import Clock
    from tandem.wire.nodes import Role

ROWS = ("tandem.cluster.pools.autoscaling.wing",)
ADAPTERS = ("tandem.cluster.adapters.desk",)
ROLLOUTS = ("tandem.cluster.pools.rollouts.wing",)

RollOut = Callable[[], Coroutine[Any, Any, None]]
"""Carries out the recorded rollout. Ends with it."""

Resizing = Callable[[Mapping["Role", int]], Awaitable[None]]
"""Orders other sizes, as an operator does. Requires `writing`."""


class ChangeAdapters(Protocol):
    """See `Control.adapters`."""

    def __call__(
        self, load: Mapping[str, str], unload: Sequence[str]
    ) -> Coroutine[Any, Any, dict[str, str]]: ...


class PoolsWing(Protocol):
    """Works beside the controller, on what it knows."""

    def begin(self) -> None:
        """The pools are looked after, or a configuration was applied: work in the background may begin. Idempotent."""
        ...

    def configured(self, config: TandemConfig) -> None:
        """This configuration is the one that the operator wants from now on."""
        ...

    def changed(self) -> None:
        """A pool was resized, or what is paused has changed: what was measured before describes another deployment."""
        ...


class PoolsWingModule(Protocol):
    def wing_of(self, pools: Reconciler, clock: Clock, tasks: Tasks, resize: Resizing) -> PoolsWing: ...


def wings_of(pools: Reconciler, clock: Clock, tasks: Tasks, resize: Resizing) -> list[PoolsWing]:
    return [
        cast("PoolsWingModule", module).wing_of(pools, clock, tasks, resize) for module in find_wings(ROWS)
    ]


class RolloutsModule(Protocol):
    def roll_out_of(self, pools: Reconciler, clock: Clock) -> RollOut: ...


def roll_out_of(pools: Reconciler, clock: Clock) -> RollOut | None:
    for module in find_wings(ROLLOUTS):
        return cast("RolloutsModule", module).roll_out_of(pools, clock)
    return None


class AdaptersModule(Protocol):
    def change_of(self, pools: Reconciler, clock: Clock) -> ChangeAdapters: ...


def adapters_of(pools: Reconciler, clock: Clock) -> ChangeAdapters:
    """Returns what changes adapters while the cluster serves, or what refuses it."""
    for module in find_wings(ADAPTERS):
        return cast("AdaptersModule", module).change_of(pools, clock)

    async def refused(load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]:
        raise ConfigurationError(
            "adapters cannot change while this installation serves: name them in model.adapters"
        )

    return refused
