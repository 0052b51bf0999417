"""Drains the nodes and routers that are leaving, each within its limit, ends their processes and forgets them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.base.errors import TandemError
from tandem.base.tasks import Tasks
from tandem.cluster.config import ClusterTimeouts
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.tasks import Clock, Wakeup, first_of

logger = logging.getLogger(__name__)


StateChange = Callable[[ClusterState], ClusterState]


class Departures:
    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        tasks: Tasks,
        changed: Wakeup,
        timeouts: Callable[[], ClusterTimeouts],
        update: Callable[[StateChange], Awaitable[None]],
        note: Callable[[str], None],
    ) -> None:
        """`timeouts` returns the current ones, `update` records a change of the state, `note` tells operators."""
        self._fleet = fleet
        self._clock = clock
        self._tasks = tasks
        self._changed = changed
        self._timeouts = timeouts
        self._update = update
        self._note = note
        self.nodes: dict[str, asyncio.Task[bool]] = {}  # the result: whether all requests ended in time
        self.routers: set[str] = set()

    def begin(
        self, node_id: str, limit_s: float, wait: Callable[[], Awaitable[None]] | None = None
    ) -> asyncio.Task[bool]:
        """Starts to drain the node. `wait` is awaited first, within the limit: until then the node serves on."""
        task = self._tasks.spawn(self._retire(node_id, limit_s, wait), f"retire {node_id}")
        self.nodes[node_id] = task
        task.add_done_callback(lambda _: self.nodes.pop(node_id, None))
        return task

    def begin_router(self, name: str, *, is_replaced: bool = True) -> None:
        """Starts to drain the router. `is_replaced`: another router takes its place, and the old one serves until that is ready."""
        self.routers.add(name)
        self._tasks.spawn(self._retire_router(name, is_replaced), f"retire {name}")

    async def _retire_router(self, name: str, is_replaced: bool) -> None:
        router = self._fleet.routers.get(name)
        if router is not None and is_replaced:
            await first_of(self._until_another_accepts(router), self._until_none_comes(router))
        finished = router is None or await router.leave()
        await self._fleet.end_router(name)
        await self._until_kept(lambda current: current.without_router(name), name)
        self.routers.discard(name)
        self._note(
            f"{name} is gone" + ("" if finished else "; requests that it had not finished have failed")
        )

    async def _until_another_accepts(self, leaving: RouterSupervisor) -> None:
        while not any(
            other.phase is ProcessPhase.READY and other.load.accepts for other in self._beside(leaving)
        ):
            await self._changed.wait()

    async def _until_none_comes(self, leaving: RouterSupervisor) -> None:
        """Gives up waiting for a successor after `timeouts.start_s`, or when a starting one has made no progress for that long."""
        limit_s = self._timeouts().start_s
        began = self._clock.now()
        while True:
            starting = [other for other in self._beside(leaving) if other.phase is ProcessPhase.STARTING]
            waited_s = min([self._clock.now() - began, *(other.progress.silent_s for other in starting)])
            if waited_s >= limit_s:
                return
            await self._clock.sleep(max(limit_s - waited_s, self._timeouts().heartbeat_s))

    def _beside(self, router: RouterSupervisor) -> list[RouterSupervisor]:
        return [
            other
            for other in self._fleet.routers.values()
            if other is not router and other.place == router.place
        ]

    async def _until_kept(self, change: StateChange, name: str) -> None:
        while True:
            try:
                return await self._update(change)
            except TandemError as error:
                logger.warning("%s is gone, but that could not be recorded; trying again: %s", name, error)
                await self._clock.sleep(self._timeouts().heartbeat_s)

    async def _retire(self, node_id: str, limit_s: float, wait: Callable[[], Awaitable[None]] | None) -> bool:
        deadline = self._clock.now() + limit_s
        if wait is not None:
            await wait()
        limit_s = max(0.0, deadline - self._clock.now())
        supervisor = self._fleet.nodes.get(node_id)
        finished = supervisor is None or await supervisor.leave(limit_s)
        await self._fleet.end_node(node_id)
        await self._until_kept(lambda current: current.without(node_id), node_id)
        self._note(
            f"{node_id} is gone"
            + ("" if finished else "; requests that it had not finished continue on other nodes")
        )
        self._fleet.wake()
        return finished
