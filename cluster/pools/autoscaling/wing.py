"""The autoscaler beside a controller: which pools it may resize, and how it orders that."""

from __future__ import annotations

import logging

from tandem.base.errors import TandemError
from tandem.base.tasks import Tasks
from tandem.cluster.config import PoolConfig, TandemConfig
from tandem.cluster.pools.autoscaling.autoscaler import Autoscaler
from tandem.cluster.pools.autoscaling.rules import PoolBounds, Resize
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.pools.wings import Resizing
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)


class ScalingPools:
    def __init__(self, pools: Reconciler, clock: Clock, tasks: Tasks, resize: Resizing) -> None:
        self._pools = pools
        self._tasks = tasks
        self._resize = resize
        self._runs = False
        fleet = pools.fleet
        self._autoscaler = Autoscaler(
            pools.config,
            clock,
            fleet.statuses,
            fleet.longest_wait_s,
            self._scaled,
            self._resize_one,
            pools.note,
        )

    def begin(self) -> None:
        """Starts the loop, once any pool may be scaled by its load."""
        if not self._runs and any(self._pools.config.pools.of(role).max is not None for role in Role):
            self._runs = True
            self._tasks.spawn(self._autoscaler.run(), "autoscale")

    def configured(self, config: TandemConfig) -> None:
        self._autoscaler.configure(config)

    def changed(self) -> None:
        self._autoscaler.changed()

    def _scaled(self) -> list[PoolBounds]:
        config, state = self._pools.config.pools, self._pools.state
        return [
            scaled_pool(role, config.of(role), state, self._pools.fleet)
            for role in Role
            if config.of(role).max is not None
            and state.sizes[role]
            and not state.paused  # requests that wait because of a pause are no load
            and state.rollout is None
        ]

    async def _resize_one(self, resize: Resize) -> None:
        try:
            async with self._pools.writing():
                if resize.role not in [pool.role for pool in self._scaled()]:
                    return  # a rollout or a pause began while this waited for its turn
                await self._resize({resize.role: resize.size})
        except TandemError as error:
            logger.warning("%s, but: %s", resize.why, error)
        else:
            self._pools.note(resize.why)


wing_of = ScalingPools


def scaled_pool(role: Role, pool: PoolConfig, state: ClusterState, fleet: Fleet) -> PoolBounds:
    """Returns a pool of fixed size and its limits."""
    records = [record for record in state.nodes if record.role is role]
    supervisors = [node for record in records if (node := fleet.nodes.get(record.node_id)) is not None]
    wanted = state.sizes[role] or 0
    return PoolBounds(
        role=role,
        wanted=wanted,
        min_nodes=pool.min,
        max_nodes=wanted if pool.max is None else pool.max,
        is_settled=len(state.staying(role)) == wanted
        and not any(record.leaving for record in records)
        and all(
            node.phase in (ProcessPhase.READY, ProcessPhase.LEFT_OUT) or node.keeps_dying
            for node in supervisors
        ),
        is_waiting=any(record.placement is None for record in records),
    )
