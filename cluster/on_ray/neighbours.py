"""The other deployments on the same Ray cluster: which places their nodes have, and which machines they ask for.

Every store here is in Ray's internal key-value store, in the namespace that its comment names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from tandem.cluster.launcher import Offer
from tandem.cluster.on_ray.runtime import NAMESPACE, namespace_of
from tandem.cluster.on_ray.state_store import RayStateStore, names_under
from tandem.cluster.pools.state import NodePlacement

logger = logging.getLogger(__name__)

STATE = "controller"  # what a deployment's controller keeps; the deployment's namespace
WANTED = "wanted"  # the resources that a deployment's nodes take of machines; the deployment's namespace
# The labels of those machines, in the same order; not every version keeps them
WANTED_LABELS = "wanted-labels"
# Followed by a name: that deployment was started and has not ended; the default namespace
_STANDS = "stands-"
# Followed by a number: a turn to place nodes. Only the turn with the highest number counts. Its value is its holder, or nothing when it
# is over.
_PLACING = "placing-"
# A controller that is killed while it places nodes holds the lock; the others break it when it is this old.
LONGEST_S = 30.0
_ASK_AGAIN_S = 0.1

Resources = list[dict[str, float]]
Selectors = list[dict[str, str]]


class _Node(msgspec.Struct, frozen=True):
    placement: NodePlacement | None = None


class _NeighbourState(msgspec.Struct, frozen=True):
    """The part of a ClusterState that neighbours read. Another version of Tandem may have written it."""

    nodes: list[_Node] = []


def stands(name: str) -> RayStateStore:
    """Holds a value from before the deployment's controller is created until everything that it left has been cleared away."""
    return RayStateStore(f"{_STANDS}{name}", NAMESPACE)


class Neighbours:
    """The other deployments, from the point of view of the controller of the deployment with this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def names(self) -> list[str]:
        there = [key.removeprefix(_STANDS) for key in await names_under(_STANDS, NAMESPACE)]
        return sorted(name for name in there if name != self._name)

    async def placements(self) -> list[NodePlacement]:
        """Returns where all nodes of the other deployments are; one entry for each machine of a node."""
        found = []
        for name in await self.names():
            kept = await RayStateStore(STATE, namespace_of(name)).load()
            nodes = msgspec.msgpack.decode(kept, type=_NeighbourState).nodes if kept else []
            found += [part for node in nodes if node.placement is not None for part in node.placement.parts]
        return found

    async def with_wanted(self, own: list[Offer]) -> list[Offer]:
        """Records what this deployment asks machines for, and returns that together with what all others ask for. Ray's
        autoscaler holds one request for the whole cluster, so each controller has to send the sum."""
        namespace = namespace_of(self._name)
        for key, wish in ((WANTED, [one.resources for one in own]), (WANTED_LABELS, [one.labels for one in own])):
            mine, encoded = RayStateStore(key, namespace), msgspec.msgpack.encode(wish)
            if await mine.load() != encoded:
                await mine.save(encoded)
        every = list(own)
        for name in await self.names():
            every += await _wanted_by(name)
        return every

    @contextlib.asynccontextmanager
    async def placing(self) -> AsyncIterator[None]:
        """Holds a lock on the placement of nodes. Without it, two deployments that look for room at the same moment would
        choose the same places. Waits until the lock is free, or its holder has had it for 30 s."""
        if not await self.names():
            yield
            return
        seen: tuple[int, bytes] | None = None
        since = time.monotonic()
        while True:
            last = max(await _turns(), default=0)
            held = await _turn(last).load() or b""
            if (last, held) != seen:
                seen, since = (last, held), time.monotonic()
            # Also by our own watch: the head's clock may have been set back since.
            is_late = bool(held) and max(_age_s(held), time.monotonic() - since) > LONGEST_S
            if is_late:
                logger.warning(
                    "the deployment %s took more than 30 s to place its nodes: another one does not wait for it",
                    held.decode().partition(" ")[0],
                )
            if (is_late or not held) and await self._take(last + 1):
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        try:
            yield
        finally:
            await _turn(last + 1).save(b"")

    async def _take(self, number: int) -> bool:
        """Takes the turn with this number. Returns False if another deployment took it: of all that do not wait for the turn before it,
        one gets it. So the highest turn is never forgotten."""
        if not await _turn(number).save_first(f"{self._name} {time.time()}".encode()):
            return False
        turns = await _turns()
        if number < max(turns):  # it had been taken, and forgotten after a later one
            await _turn(number).forget()
            return False
        for earlier in turns:
            if earlier != number:
                await _turn(earlier).forget()
        return True


def _turn(number: int) -> RayStateStore:
    return RayStateStore(f"{_PLACING}{number}", NAMESPACE)


async def _turns() -> list[int]:
    return [int(key.removeprefix(_PLACING)) for key in await names_under(_PLACING, NAMESPACE)]


async def _wanted_by(name: str) -> list[Offer]:
    wanted, labelled = [await RayStateStore(key, namespace_of(name)).load() for key in (WANTED, WANTED_LABELS)]
    resources = msgspec.msgpack.decode(wanted, type=Resources) if wanted else []
    labels = msgspec.msgpack.decode(labelled, type=Selectors) if labelled else []
    if len(labels) != len(resources):  # another process is writing them, or an older version never did
        labels = [{} for _ in resources]
    return [Offer(*both) for both in zip(resources, labels, strict=True)]


def _age_s(held: bytes) -> float:
    """By the head's clock: every controller runs there."""
    return time.time() - float(held.decode().partition(" ")[2])
