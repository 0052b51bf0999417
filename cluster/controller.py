"""Keeps a deployment what its configuration says: one supervisor for every node and for the router.

Plain asyncio, no Ray: where processes run is the launcher's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from cluster.clock import Clock, cancel
from cluster.config import ClusterTimeouts
from cluster.events import Events
from cluster.launcher import Launcher, NodeHandle, RouterHandle
from cluster.membership import Membership
from cluster.node_supervisor import NodeSupervisor
from cluster.router_supervisor import RouterSupervisor
from cluster.supervisor import Phase
from engine.node_config import NodeConfig
from router.config import RouterConfig
from wire.errors import InternalError, TandemError, Unavailable
from wire.nodes import NodeInfo, Role

logger = logging.getLogger(__name__)


class Controller:
    """`start`, then `failed` for as long as it serves, then `drain` if there is time, then `stop`."""

    def __init__(
        self,
        nodes: Sequence[NodeConfig],
        router: RouterConfig,
        launcher: Launcher,
        timeouts: ClusterTimeouts,
        events: Events,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or Clock()
        self._timeouts = timeouts
        self._clock = clock
        self._membership = Membership()
        self.nodes = [
            NodeSupervisor(node, launcher, self._membership, timeouts, events, clock) for node in nodes
        ]
        self.router = RouterSupervisor(router, launcher, self._membership, timeouts, events, clock)
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def _supervisors(self) -> list[NodeSupervisor | RouterSupervisor]:
        return [self.router, *self.nodes]

    @property
    def members(self) -> list[NodeInfo]:
        """The nodes that the router is told of."""
        return self._membership.members

    @property
    def url(self) -> str:
        return self.router.url

    async def start(self) -> None:
        """Starts everything at once. Returns when each part is ready or left out, and together they can answer;
        raises Unavailable when they cannot."""
        for supervisor in self._supervisors:
            task = asyncio.create_task(supervisor.run(), name=f"supervise {supervisor.name}")
            task.add_done_callback(self._supervisor_ended)
            self._tasks.append(task)
        settled: asyncio.Future[Any] = asyncio.gather(
            *(supervisor.settled() for supervisor in self._supervisors)
        )
        try:
            either: list[asyncio.Future[Any]] = [settled, self._failure]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(settled)
        if self._failure.done():
            raise InternalError(self._failure.result())
        self._check_can_answer()

    def _check_can_answer(self) -> None:
        if self.router.phase is Phase.LEFT_OUT:
            raise Unavailable(f"the router cannot start: {self.router.detail}")
        writers = [node for node in self.nodes if node.config.role is not Role.PREFILL]
        if all(node.phase is Phase.LEFT_OUT for node in writers):
            reasons = "; ".join(sorted({f"{node.name}: {node.detail}" for node in writers}))
            raise Unavailable(f"no node that can write answers has started: {reasons}")

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        """A part that is left out ends in peace; an error here is a bug, and nobody would mend anything any more."""
        if task.cancelled() or task.exception() is None or self._failure.done():
            return
        logger.error("%s died", task.get_name(), exc_info=task.exception())
        self._failure.set_result(f"{task.get_name()} died: {task.exception()!r}")

    async def failed(self) -> str:
        """Returns when the controller itself can no longer do its work, with the reason."""
        return await asyncio.shield(self._failure)

    async def drain(self) -> bool:
        """The router takes nothing new, what runs is finished, transfers are confirmed. True when all of it was
        done within `timeouts.nodes.drain_s`. Nodes that die meanwhile are replaced as ever."""
        deadline = self._clock.now() + self._timeouts.nodes.drain_s
        if self.router.phase is not Phase.READY or self.router.handle is None:
            return False
        quiet = await self._drained(self.router.handle, deadline)
        ready = [node.handle for node in self.nodes if node.phase is Phase.READY and node.handle is not None]
        return all([quiet, *await asyncio.gather(*(self._drained(handle, deadline) for handle in ready))])

    async def _drained(self, handle: NodeHandle | RouterHandle, deadline: float) -> bool:
        left = max(0.0, deadline - self._clock.now())
        try:
            return await self._clock.within(left + self._timeouts.stop_s, handle.drain(left), "draining")
        except TandemError as error:
            logger.warning("draining: %s", error)
            return False

    async def stop(self) -> None:
        """Ends every process. Idempotent; whatever is still running is lost."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
