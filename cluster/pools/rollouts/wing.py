"""Carries out the recorded rollout, one step at a time."""

from __future__ import annotations

import logging

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.rollouts import steps
from tandem.cluster.pools.rollouts.watch import RolloutWatch
from tandem.cluster.pools.wings import Joints
from tandem.cluster.tasks import Clock

logger = logging.getLogger(__name__)


def join(joints: Joints) -> None:
    joints.roll_out = RollingOut(joints.pools, joints.clock).run


class RollingOut:
    def __init__(self, pools: Reconciler, clock: Clock) -> None:
        self._pools = pools
        self._clock = clock
        self._watch = RolloutWatch(pools.fleet, clock)

    async def run(self) -> None:
        """Looks at every heartbeat until the rollout is over: some steps wait for time to pass."""
        self._watch.forget()
        while self._pools.state.rollout is not None:
            try:
                await self._look()
            except TandemError as error:
                logger.warning("the rollout waits: %s", error)
            await self._clock.sleep(self._pools.config.timeouts.heartbeat_s)

    async def _look(self) -> None:
        pools = self._pools
        async with pools.writing():
            if (
                pools.state.rollout is None or not pools.has_looked
            ):  # routers that serve may not be launched yet
                return
            facts = self._watch.facts(pools.state, pools.config, pools.machines)
            step = steps.next_step(
                pools.config.rollout, pools.fleet.config.pools, pools.state, pools.machines, facts
            )
            pools.rollout_waits = step.why if isinstance(step, steps.Wait) else ""
            match step:
                case steps.Replace(node):
                    await pools.keep(pools.state.with_node(msgspec.structs.replace(node, leaving=True)))
                    pools.note(f"{node.node_id} drains and is replaced")
                    pools.departures.begin(node.node_id, pools.config.timeouts.nodes.drain_s)
                case steps.AddRouter(old):
                    host = pools.fleet.router_places(pools.machines).get(old.place)
                    new = pools.fleet.new_router(old.place, host, pools.state.routers)
                    if new is not None:
                        await pools.keep(pools.state.with_router(new))
                        pools.fleet.launch_router(new, host)
                case steps.ReplaceRouter(old):
                    await pools.keep(pools.state.with_router(msgspec.structs.replace(old, leaving=True)))
                    pools.note(f"{old.name} drains and is replaced")
                    pools.departures.begin_router(old.name)
                case steps.GoBack(why):
                    self._watch.forget()
                    await pools.go_back(why)
                case steps.RolloutEnd():
                    back = pools.state.rollout.going_back
                    await pools.keep_and_use(msgspec.structs.replace(pools.state, rollout=None))
                    pools.note(f"the rollout was taken back: {back}" if back else "the rollout is done")
                case steps.Wait():
                    pass
        pools.wake()
