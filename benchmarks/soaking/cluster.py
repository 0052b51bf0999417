"""The cluster, as its router reports it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx
import msgspec

from tandem.base.errors import DeadlineExceeded, Unavailable

_ASK_EVERY_S = 0.25
# A node's report must be newer than the last answer; nodes report four times a second.
_REPORTED_S = 1.0


class NodeLook(msgspec.Struct, frozen=True):
    node_id: str
    incarnation: str
    state: str
    unusable: str | None = None
    free_blocks: int = 0
    total_blocks: int = 0
    running: int = 0
    waiting: int = 0
    transfers: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0

    @property
    def is_quiet(self) -> bool:
        return self.free_blocks == self.total_blocks > 0 and not (
            self.running or self.waiting or self.transfers or self.held_blocks or self.quarantined_blocks
        )


class _Cluster(msgspec.Struct, frozen=True):
    nodes: list[NodeLook]


def is_whole(nodes: Sequence[NodeLook], count: int) -> bool:
    return len(nodes) == count and all(node.state == "ready" and node.unusable is None for node in nodes)


class SoakCluster:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False)

    async def nodes(self) -> list[NodeLook]:
        try:
            response = await self._http.get("/cluster")
            return msgspec.json.decode(response.raise_for_status().content, type=_Cluster).nodes
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise Unavailable(f"the router does not show its cluster: {error}") from error

    async def until_quiet(self, count: int, within_s: float) -> list[NodeLook]:
        """Waits until all nodes are there, every block is free and no request is running."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            nodes = await self.nodes()
            waited = time.monotonic() - began
            if waited > _REPORTED_S and is_whole(nodes, count) and all(node.is_quiet for node in nodes):
                return nodes
            if waited > within_s:
                busy = [node for node in nodes if not node.is_quiet]
                raise DeadlineExceeded(f"not quiet {within_s:.0f} s after the last answer: {busy or nodes}")

    async def close(self) -> None:
        await self._http.aclose()
