"""Drains the nodes and routers that are leaving, each within its limit, ends their processes and forgets them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from tandem.base.errors import DeadlineExceeded, TandemError
from tandem.base.tasks import Tasks
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.supervisor import ProcessPhase, StateChange, StateRecorder
from tandem.cluster.tasks import Clock, first_of, has_ended

logger = logging.getLogger(__name__)


class Departures:
    def __init__(self, recorder: StateRecorder, fleet: Fleet, clock: Clock, tasks: Tasks) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._clock = clock
        self._tasks = tasks
        self.nodes: dict[str, asyncio.Task[bool]] = {}  # the result: whether all requests ended in time
        self.routers: set[str] = set()

    def begin(self, node_id: str, limit_s: float, stay_s: float = 0.0) -> None:
        """Starts to drain the node. One that writes answers first serves on until another one does, at most for `stay_s` of the limit."""
        task = self._tasks.spawn(self._retire(node_id, limit_s, stay_s), f"retire {node_id}")
        self.nodes[node_id] = task
        task.add_done_callback(lambda _: self.nodes.pop(node_id, None))

    def begin_router(self, name: str, *, is_replaced: bool) -> None:
        """Starts to drain the router. `is_replaced`: another router takes its place, and the old one serves until that is ready."""
        self.routers.add(name)
        self._tasks.spawn(self._retire_router(name, is_replaced), f"retire {name}")

    async def _retire(self, node_id: str, limit_s: float, stay_s: float) -> bool:
        finished = await self._unless_lost(node_id, self._until_drained(node_id, limit_s, stay_s))
        await self._fleet.end_node(node_id)
        await self._until_kept(lambda current: current.without(node_id), node_id)
        self._say_gone(node_id, finished, "continue on other nodes")
        self._recorder.wake()
        return bool(finished)

    async def _until_drained(self, node_id: str, limit_s: float, stay_s: float) -> bool:
        deadline = self._clock.now() + limit_s
        node = self._fleet.nodes.get(node_id)
        if node is not None and node.config.role.writes_answers and stay_s > 0:
            with contextlib.suppress(DeadlineExceeded):
                what = "starting another node that decodes"
                await self._clock.within(stay_s, self._until_another_writes(node_id), what)
        node = self._fleet.nodes.get(node_id)
        return node is None or await node.leave(max(0.0, deadline - self._clock.now()))

    async def _until_another_writes(self, node_id: str) -> None:
        while not any(
            node.name != node_id and node.config.role.writes_answers and node.phase is ProcessPhase.READY
            for node in self._fleet.nodes.values()
        ):
            await self._recorder.changed.wait()

    async def _retire_router(self, name: str, is_replaced: bool) -> None:
        finished = await self._unless_lost(name, self._until_router_drained(name, is_replaced))
        await self._fleet.end_router(name)
        await self._until_kept(lambda current: current.without_router(name), name)
        self.routers.discard(name)  # at once: the next router of the place may get the name
        self._say_gone(name, finished, "have failed")
        self._recorder.wake()

    async def _until_router_drained(self, name: str, is_replaced: bool) -> bool:
        router = self._fleet.routers.get(name)
        if router is not None and is_replaced:
            await first_of(self._until_another_accepts(router), self._until_none_comes(router))
        return router is None or await router.leave()

    async def _unless_lost(self, name: str, leaving: Coroutine[Any, Any, bool]) -> bool | None:
        """Returns whether its requests ended in time; None if its machine has gone meanwhile, which operators are told elsewhere."""

        async def until_lost() -> None:
            while not self._recorder.is_lost(name):
                await self._recorder.changed.wait()

        if self._recorder.is_lost(name):
            leaving.close()
            return None
        left, _ = await first_of(leaving, until_lost())
        return left.result() if has_ended(left) else None

    def _say_gone(self, name: str, finished: bool | None, else_they: str) -> None:
        if finished is not None:
            self._recorder.note(
                f"{name} is gone" + ("" if finished else f"; requests that it had not finished {else_they}")
            )

    async def _until_another_accepts(self, leaving: RouterSupervisor) -> None:
        while not any(
            other.phase is ProcessPhase.READY and other.load.accepts for other in self._fleet.beside(leaving)
        ):
            await self._recorder.changed.wait()

    async def _until_none_comes(self, leaving: RouterSupervisor) -> None:
        """Gives up waiting for a successor after `timeouts.start_s`, or when a starting one has made no progress for that long."""
        limit_s = self._fleet.config.timeouts.start_s
        began = self._clock.now()
        while True:
            starting = [other for other in self._fleet.beside(leaving) if other.phase is ProcessPhase.STARTING]
            waited_s = min([self._clock.now() - began, *(other.progress.silent_s for other in starting)])
            if waited_s >= limit_s:
                return
            await self._clock.sleep(max(limit_s - waited_s, self._fleet.config.timeouts.heartbeat_s))

    async def _until_kept(self, change: StateChange, name: str) -> None:
        while True:
            try:
                return await self._recorder.update(change)
            except TandemError as error:
                logger.warning("%s is gone, but that could not be recorded; trying again: %s", name, error)
                await self._clock.sleep(self._fleet.config.timeouts.heartbeat_s)
