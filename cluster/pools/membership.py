"""The nodes that routers may use, as one value that only ever is replaced as a whole.

Level-triggered: a router that missed ten changes needs the last one only, and a new router the same.
"""

from __future__ import annotations

import asyncio

from tandem.wire.nodes import NodeInfo


class Membership:
    def __init__(self) -> None:
        self._members: dict[str, NodeInfo] = {}
        self._changed = asyncio.Condition()
        self.revision = 0

    @property
    def members(self) -> list[NodeInfo]:
        return list(self._members.values())

    async def announce(self, info: NodeInfo) -> None:
        if self._members.get(info.node_id) != info:
            self._members[info.node_id] = info
            await self._publish()

    async def withdraw(self, info: NodeInfo) -> None:
        """Another incarnation under the same id stays."""
        if self._members.get(info.node_id) == info:
            del self._members[info.node_id]
            await self._publish()

    async def _publish(self) -> None:
        self.revision += 1
        async with self._changed:
            self._changed.notify_all()

    async def newer_than(self, revision: int) -> int:
        """Waits for a revision after this one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.revision > revision)
            return self.revision
