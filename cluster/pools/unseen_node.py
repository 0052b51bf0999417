"""A node on a machine that this controller has not seen yet. An earlier controller placed it there, and it may be serving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from tandem.base.errors import TandemError, Unavailable
from tandem.base.logs import LogPage, LogPosition
from tandem.base.progress import Report
from tandem.cluster.launcher import LogSource, NodeHandle
from tandem.node.config import NodeConfig
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import NodeStatus


class UnseenNode:
    """Stands in for the node's handle with what was last announced. Until `seen` is set, calls raise Unavailable, and only routers can
    say whether the node serves. After that, `launch` finds the node by its name."""

    def __init__(
        self,
        info: NodeInfo,
        seen: asyncio.Event,
        launch: Callable[[], NodeHandle],
        end: Callable[[str], Awaitable[None]],
    ) -> None:
        self._info = info
        self._seen = seen
        self._launch = launch
        self._end = end
        self._found: asyncio.Task[NodeHandle] | None = None
        self._handle: NodeHandle | None = None  # once it is found

    @property
    def keepers(self) -> Mapping[str, LogSource]:
        return self._handle.keepers if self._handle is not None else {}

    async def start(self, report: Report) -> NodeInfo:
        return self._info

    async def ended(self) -> str:
        await self._seen.wait()
        try:
            node = await self._node()
        except TandemError as error:
            return f"it was not found again: {error}"
        return await node.ended()

    async def admit(self, keys: list[str]) -> None:
        await (await self._node()).admit(keys)

    async def status(self) -> NodeStatus:
        return await (await self._node()).status()

    async def routers_heard(self) -> list[str]:
        return await (await self._node()).routers_heard()

    async def drain(self, timeout_s: float) -> bool:
        return await (await self._node()).drain(timeout_s)

    async def reset_cache(self, timeout_s: float) -> bool:
        return await (await self._node()).reset_cache(timeout_s)

    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        return await (await self._node()).log_page(after, last, most)

    async def set_adapters(self, wanted: Mapping[str, str], timeout_s: float, report: Report) -> dict[str, str]:
        return await (await self._node()).set_adapters(wanted, timeout_s, report)

    async def change_role(self, config: NodeConfig, report: Report) -> NodeInfo:
        return await (await self._node()).change_role(config, report)

    async def stop(self) -> None:
        if self._found is not None:
            with contextlib.suppress(TandemError):  # then `_find` has stopped it
                await (await self._found).stop()
        else:
            await self._end(self._info.node_id)

    async def _node(self) -> NodeHandle:
        if not self._seen.is_set():
            raise Unavailable("its machine is not seen by Ray")
        if self._found is None:
            self._found = asyncio.create_task(self._find())
        return await asyncio.shield(self._found)

    async def _find(self) -> NodeHandle:
        """If the process has ended, `launch` starts another one. Its status then shows another incarnation, so it is replaced."""
        handle = self._launch()
        try:
            await handle.start(lambda what, share: None)
        except TandemError:
            await handle.stop()
            raise
        self._handle = handle
        return handle
