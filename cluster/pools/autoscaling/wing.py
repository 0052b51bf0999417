"""The autoscaler beside a controller: which pools it may resize, and how it orders that."""

from __future__ import annotations

import logging

from tandem.base.errors import TandemError
from tandem.cluster.config import PoolConfig
from tandem.cluster.pools.autoscaling.autoscaler import Autoscaler
from tandem.cluster.pools.autoscaling.rules import PoolBounds, Resize
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.wings import Joints
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)


def join(joints: Joints) -> None:
    ScalingPools(joints)


class ScalingPools:
    def __init__(self, joints: Joints) -> None:
        self._pools = pools = joints.pools
        self._joints = joints
        self._runs = False
        self._autoscaler = Autoscaler(
            pools.config,
            joints.clock,
            lambda: pools.facts().statuses,
            lambda: pools.facts().longest_wait_s,
            self._scaled,
            self._resize_one,
            pools.note,
        )
        joints.begin.append(self.begin)
        joints.configured.append(self._autoscaler.configure)
        joints.changed.append(self._autoscaler.changed)

    def begin(self) -> None:
        """Starts the loop, once any pool may be scaled by its load."""
        if not self._runs and any(self._pools.config.pools.of(role).max is not None for role in Role):
            self._runs = True
            self._joints.tasks.spawn(self._autoscaler.run(), "autoscale")

    def _scaled(self) -> list[PoolBounds]:
        if self._pools.fleet.is_draining:
            return []  # the last requests are no reason for a node that would end with them
        config, state, facts = self._pools.config.pools, self._pools.state, self._pools.facts()
        return [
            scaled_pool(role, config.of(role), state, facts)
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
                await self._joints.resize({resize.role: resize.size})
        except TandemError as error:
            logger.warning("%s, but: %s", resize.why, error)
        else:
            self._pools.note(resize.why)


def scaled_pool(role: Role, pool: PoolConfig, state: ClusterState, facts: Facts) -> PoolBounds:
    """Returns a pool of fixed size and its limits."""
    records = [record for record in state.nodes if record.role is role]
    nodes = [node for record in records if (node := facts.nodes.get(record.node_id)) is not None]
    wanted = state.sizes[role] or 0
    return PoolBounds(
        role=role,
        wanted=wanted,
        min_nodes=pool.min,
        max_nodes=wanted if pool.max is None else pool.max,
        is_settled=len(state.staying(role)) == wanted
        and not any(record.leaving for record in records)
        and all(node.is_settled for node in nodes),
        is_waiting=any(record.placement is None for record in records),
    )
