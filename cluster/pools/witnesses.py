"""Asks other processes about one that does not answer the controller. The network between the controller and a process may be broken
while the process serves, so it is ended for its silence only if the processes that work with it hear nothing either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.base.errors import TandemError
from tandem.cluster.launcher import NodeHandle, RouterHandle
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import NodeInfo, NodeSighting, RouterInfo

T = TypeVar("T")


@dataclass(eq=False)
class Witnesses:
    """`nodes` and `routers` return those that serve, as far as the controller knows."""

    _nodes: Callable[[], Sequence[NodeHandle]]
    _routers: Callable[[], Sequence[RouterHandle]]
    _clock: Clock
    _answer_s: float

    async def of_node(self, info: NodeInfo) -> NodeSighting | None:
        """Returns the sighting of the router that heard the node last. None: no router that knows the node answered."""
        told = await self._ask([router.nodes_heard() for router in self._routers()])
        seen = [one for answer in told for one in answer if (one.node_id, one.epoch) == (info.node_id, info.epoch)]
        return min(seen, key=lambda sighting: sighting.silent_s, default=None)

    async def of_router(self, handle: RouterHandle, info: RouterInfo, *, is_alone: bool) -> bool | None:
        """Returns whether clients or nodes hear the router. None: there are nodes, but none answered. `is_alone` says that no other
        router answers at its URL, so an answer there is its own."""
        if is_alone and any(await self._ask([handle.answers_clients()])):
            return True
        nodes = self._nodes()
        told = await self._ask([node.routers_heard() for node in nodes])
        if nodes and not told:
            return None
        return any(info.inbox_endpoint in heard for heard in told)

    async def _ask(self, questions: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Returns the answers that come in time."""

        async def answer(question: Coroutine[Any, Any, T]) -> list[T]:
            try:
                return [await self._clock.within(self._answer_s, question, "a question to a witness")]
            except TandemError:
                return []

        return [one for answers in await asyncio.gather(*map(answer, questions)) for one in answers]


class Silence:
    """Counts for how long a process has not answered. Time in which the controller's own process stood still does not count."""

    def __init__(self, clock: Clock, longest_look_s: float) -> None:
        self._clock = clock
        self._longest_look_s = longest_look_s
        self._looked_at = clock.now()
        self.seconds = 0.0

    def answered(self) -> None:
        self._looked_at, self.seconds = self._clock.now(), 0.0

    def not_answered(self) -> None:
        now = self._clock.now()
        self.seconds += min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
