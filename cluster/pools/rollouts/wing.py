"""Carries out the recorded rollout, one step at a time."""

from __future__ import annotations

import logging

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.rollouts import steps
from tandem.cluster.pools.rollouts.watch import rollout_facts
from tandem.cluster.pools.wings import Joints
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)


def join(joints: Joints) -> None:
    joints.roll_out = RollingOut(joints.pools, joints.clock).run


class RollingOut:
    def __init__(self, pools: Reconciler, clock: Clock) -> None:
        self._pools = pools
        self._clock = clock
        self._unfit_since: dict[Role, float] = {}  # since when no machine has what a pool's new nodes need

    async def run(self) -> None:
        """Looks at every heartbeat until the rollout is over: some steps wait for time to pass."""
        self._unfit_since.clear()
        while self._pools.state.rollout is not None:
            try:
                await self._look()
            except TandemError as error:
                logger.warning("the rollout waits: %s", error)
            await self._clock.sleep(self._pools.config.timeouts.heartbeat_s)

    async def _look(self) -> None:
        pools = self._pools
        async with pools.writing():
            if pools.state.rollout is None or not pools.has_looked:  # routers that serve may not be launched yet
                return
            config, before = pools.fleet.config, pools.fleet.config_of(pools.state.rollout.before.number)
            facts = rollout_facts(pools.config, config, before, pools.state, pools.facts(), self._unfit_since)
            step = steps.next_step(pools.config.rollout, config, pools.state, facts)
            pools.rollout_waits = step.why if isinstance(step, steps.Wait) else ""
            match step:
                case steps.GoBack(why):
                    self._unfit_since.clear()
                    await pools.go_back(why)
                case steps.RolloutEnd():
                    back = pools.state.rollout.going_back
                    await pools.keep_and_use(msgspec.structs.replace(pools.state, rollout=None))
                    pools.note(f"the rollout was taken back: {back}" if back else "the rollout is done")
                case steps.Wait():
                    pass
                case change:
                    await pools.make(change)
        pools.wake()
