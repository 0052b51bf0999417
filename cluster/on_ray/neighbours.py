"""The other deployments on the same Ray cluster: which places their nodes have, and which machines they ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from tandem.cluster.launcher import Offer
from tandem.cluster.on_ray.runtime import NAMESPACE, namespace_of
from tandem.cluster.on_ray.state_store import RayStateStore, kept_under
from tandem.cluster.pools.state import NodePlacement

logger = logging.getLogger(__name__)

STATE = "controller"  # what a deployment's controller keeps, in its namespace
WANTED = "wanted"  # what its nodes take of machines, in its namespace
WANTED_LABELS = "wanted-labels"  # and the labels of each of those machines; not every version keeps them
_STANDS = (
    "stands-"  # with a name: that deployment has been started, and has not ended; in the default namespace
)
_PLACING = RayStateStore("placing", NAMESPACE)
# A controller that is killed while it places nodes keeps the others from placing nodes for so long.
_LONGEST_S = 30.0
_ASK_AGAIN_S = 0.1

Resources = list[dict[str, float]]
Selectors = list[dict[str, str]]


class _Node(msgspec.Struct, frozen=True):
    placement: NodePlacement | None = None


class _Kept(msgspec.Struct, frozen=True):
    """The part of a ClusterState that neighbours read. Another version of Tandem may have kept it."""

    nodes: list[_Node] = []


def stands(name: str) -> RayStateStore:
    """Holds something from before the deployment's controller is made until all that it left was cleared away."""
    return RayStateStore(f"{_STANDS}{name}", NAMESPACE)


class Neighbours:
    """As the controller of the deployment with this name sees them."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def names(self) -> list[str]:
        there = [key.removeprefix(_STANDS) for key in await kept_under(_STANDS, NAMESPACE)]
        return sorted(name for name in there if name != self._name)

    async def placements(self) -> list[NodePlacement]:
        """Where all their nodes are, on each machine."""
        found = []
        for name in await self.names():
            kept = await RayStateStore(STATE, namespace_of(name)).load()
            nodes = msgspec.msgpack.decode(kept, type=_Kept).nodes if kept else []
            found += [part for node in nodes if node.placement is not None for part in node.placement.parts]
        return found

    async def with_wanted(self, own: list[Offer]) -> list[Offer]:
        """What all deployments together ask machines for, now that this one asks for `own`: Ray's autoscaler knows one wish."""
        namespace = namespace_of(self._name)
        for key, wish in (
            (WANTED, [one.resources for one in own]),
            (WANTED_LABELS, [one.labels for one in own]),
        ):
            mine, encoded = RayStateStore(key, namespace), msgspec.msgpack.encode(wish)
            if await mine.load() != encoded:
                await mine.save(encoded)
        every = list(own)
        for name in await self.names():
            every += await _wanted_by(name)
        return every

    @contextlib.asynccontextmanager
    async def placing(self) -> AsyncIterator[None]:
        """For as long as it lasts no other deployment places nodes: two that look at the same moment would find the same place."""
        if not await self.names():
            yield
            return
        mine = f"{self._name} {time.time()}".encode()
        while not await _PLACING.save_first(mine):
            held = await _PLACING.load()
            if held is not None and _age_s(held) > _LONGEST_S:
                logger.warning(
                    "the deployment %s did not say that it has placed its nodes",
                    held.decode().partition(" ")[0],
                )
                await _PLACING.forget()
            await asyncio.sleep(_ASK_AGAIN_S)
        try:
            yield
        finally:
            if await _PLACING.load() == mine:
                await _PLACING.forget()


async def _wanted_by(name: str) -> list[Offer]:
    wanted, labelled = [
        await RayStateStore(key, namespace_of(name)).load() for key in (WANTED, WANTED_LABELS)
    ]
    resources = msgspec.msgpack.decode(wanted, type=Resources) if wanted else []
    labels = msgspec.msgpack.decode(labelled, type=Selectors) if labelled else []
    if len(labels) != len(resources):  # they are being written, or never were
        labels = [{} for _ in resources]
    return [Offer(*both) for both in zip(resources, labels, strict=True)]


def _age_s(held: bytes) -> float:
    """By the clock of the head, where every controller runs."""
    return time.time() - float(held.decode().partition(" ")[2])
