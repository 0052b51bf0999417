"""The router as a Ray actor: a thin shell around RouterServer, with no logic of its own."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import ray

from router.config import RouterConfig
from router.server import RouterServer
from wire.nodes import NodeInfo


@ray.remote
class RouterActor:
    """Arguments and answers are msgpack bytes or plain values, so that neither side depends on how Ray pickles."""

    def __init__(self, config: bytes) -> None:
        self._server = RouterServer(msgspec.msgpack.decode(config, type=RouterConfig))
        self._stopped = asyncio.Event()

    async def start(self) -> str:
        """Returns the base URL, once it answers."""
        url = await self._server.start()
        # A collection that walked over what was imported would keep every stream waiting.
        gc.collect()
        gc.freeze()
        return url

    async def set_members(self, members: bytes) -> None:
        """`members` is a list of NodeInfo: the whole membership, every time."""
        self._server.set_members(msgspec.msgpack.decode(members, type=list[NodeInfo]))

    async def drain(self, timeout_s: float) -> bool:
        """False when some requests had to be failed because the time was over."""
        return await self._server.drain(timeout_s)

    async def stop(self) -> None:
        await self._server.stop()
        self._stopped.set()

    async def hold(self) -> None:
        """Returns when the router has been stopped. Whoever waits for it learns at once when the process dies."""
        await self._stopped.wait()
