"""A node's supervisor: asks it twice a second how it is, and tells the routers whether to use it."""

from __future__ import annotations

from cluster.clock import Clock
from cluster.config import ClusterTimeouts
from cluster.describe import ranges
from cluster.events import Events
from cluster.launcher import Launcher, NodeHandle
from cluster.membership import Membership
from cluster.supervisor import Supervisor
from engine.node_config import NodeConfig
from wire.errors import TandemError
from wire.nodes import NodeInfo, NodeState
from wire.requests import NodeStatus


class NodeSupervisor(Supervisor[NodeHandle, NodeInfo]):
    def __init__(
        self,
        config: NodeConfig,
        launcher: Launcher,
        membership: Membership,
        timeouts: ClusterTimeouts,
        events: Events,
        clock: Clock,
    ) -> None:
        super().__init__(config.node_id, timeouts, events, clock)
        self.config = config
        self._launcher = launcher
        self._membership = membership

    def _launch(self) -> NodeHandle:
        return self._launcher.launch_node(self.config)

    async def _start(self, handle: NodeHandle) -> NodeInfo:
        info = await handle.start(self.report)
        await self._membership.announce(info)
        return info

    def _describe(self, info: NodeInfo) -> str:
        device = self.config.engine.model.device
        where = "" if device == "auto" else f" on {device}"
        cores = f", cores {ranges(self.config.cores)}" if self.config.cores else ""
        return f"{info.role.value}{where}{cores}"

    async def _lost(self, info: NodeInfo) -> None:
        await self._membership.withdraw(info)

    async def _watch(self, handle: NodeHandle, info: NodeInfo) -> str:
        """A late answer takes the node out of the routers' view until it answers again; only a long silence,
        a failure that it admits, or an engine that is stuck gets it replaced."""
        timeouts = self._timeouts
        last_answer = self._clock.now()
        while True:
            try:
                status = await self._clock.within(
                    timeouts.silence_s, handle.status(), f"{self.name}'s status"
                )
            except TandemError as error:
                if await self._membership.withdraw(info):
                    self._events.trouble(self.name, f"does not answer, routers leave it alone: {error}")
                silence = self._clock.now() - last_answer
                if silence >= timeouts.unresponsive_s:
                    return f"it has not answered for {silence:.0f} s"
            else:
                last_answer = self._clock.now()
                reason = self._unfit(status, info)
                if reason is not None:
                    return reason
                await self._membership.announce(info)
            await self._clock.sleep(timeouts.heartbeat_s)

    def _unfit(self, status: NodeStatus, info: NodeInfo) -> str | None:
        if status.epoch != info.epoch:
            return f"it answers with epoch {status.epoch}, but was started as {info.epoch}"
        if status.state is NodeState.FAILED:
            return f"it failed: {status.detail or 'it does not say why'}"
        if status.step_age_s > self._timeouts.step_s:
            return f"its engine has been in one step for {status.step_age_s:.0f} s"
        return None
