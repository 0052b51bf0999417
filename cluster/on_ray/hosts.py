"""The machines of a Ray cluster, and the one that asks its autoscaler for more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cluster.hosts import Host, StateStore
from cluster.on_ray.runtime import HEAD_ONLY, joined_ray
from cluster.pools.cores import Found, share_cores
from cluster.pools.placement import this_machine
from cluster.pools.places import ROLES, Needs, needed_by, places
from wire.errors import TandemError, Unavailable
from wire.nodes import Role

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0  # Ray announces no changes of its nodes
_FIND_OUT_S = 60.0  # a process has to start there first

FindOut = Callable[[str], Found]
"""Asks the Ray node with this id what it is made of. Blocks."""


class RayHosts:
    """`cluster.hosts.Hosts` for a cluster: every Ray node that offers a role's resource.

    `needs` is what one node of a role takes besides that, such as {"GPU": 1}: a place without it is none.
    """

    def __init__(
        self,
        store: StateStore,
        needs: Needs,
        nodes: Callable[[], list[dict[str, Any]]] | None = None,
        find_out: FindOut | None = None,
        request: Callable[[list[dict[str, float]]], None] | None = None,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._store = (
            store  # which cores each host was given: a controller that comes back must not change them
        )
        self._needs = needs
        self._nodes = nodes or _ray_nodes
        self._find_out = find_out or _ask_ray_node
        self._request = request or _request_resources
        self._look_again_s = look_again_s
        self._found: dict[str, Found] = {}
        self._given: dict[str, tuple[int, ...]] | None = None
        self._last_seen: frozenset[str] | None = None
        self._wanted: list[dict[str, float]] | None = None

    async def present(self) -> list[Host]:
        there = await self._places()
        self._last_seen = frozenset(there)
        # The head alone may offer no place: nothing runs on its cores that would have to know them.
        unknown = [name for name, host in there.items() if host.slots and name not in self._found]
        for name, found in zip(unknown, await asyncio.gather(*map(self._ask, unknown)), strict=True):
            if found is not None:
                self._found[name] = found
        self._found = {name: found for name, found in self._found.items() if name in there}
        cores = await self._share()
        return [
            msgspec.structs.replace(host, cores=cores[name], gpus=self._found[name].gpus)
            if name in self._found
            else host
            for name, host in there.items()
            if name in self._found or not host.slots
        ]

    async def _places(self) -> dict[str, Host]:
        """In the order of their addresses, without what only the machines themselves know."""
        nodes = [node for node in await asyncio.to_thread(self._nodes) if node["Alive"]]
        nodes.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        hosts = [
            Host(
                name=node["NodeID"],
                address=node["NodeManagerAddress"],
                slots=places(node["Resources"], self._needs),
                head=any(name in node["Resources"] for name in HEAD_ONLY),
            )
            for node in nodes
        ]
        return {host.name: host for host in hosts if host.slots or host.head}

    async def _ask(self, name: str) -> Found | None:
        try:
            return await asyncio.to_thread(self._find_out, name)
        except TandemError as error:
            logger.warning("a machine that has come is left alone for now: %s", error)
            return None

    async def _share(self) -> dict[str, tuple[int, ...]]:
        if self._given is None:
            kept = await self._store.load()
            self._given = msgspec.msgpack.decode(kept, type=dict[str, tuple[int, ...]]) if kept else {}
        shares = share_cores(self._found, self._given)
        if shares != self._given:
            self._given = shares
            await self._store.save(msgspec.msgpack.encode(shares))
        return shares

    async def changed(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, self._look_again_s))
            there = await self._places()
            if frozenset(there) != self._last_seen:
                return
            if any(host.slots and name not in self._found for name, host in there.items()):
                return

    async def want(self, slots: dict[Role, int]) -> None:
        bundles = [needed_by(role, self._needs) for role in ROLES for _ in range(slots.get(role, 0))]
        if bundles == self._wanted:
            return
        await asyncio.to_thread(self._request, bundles)
        self._wanted = bundles


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = joined_ray().nodes()
    return nodes


def _ask_ray_node(name: str) -> Found:
    ray = joined_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(look_around)
    placed = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=name, soft=False))
    try:
        return msgspec.msgpack.decode(ray.get(placed.remote(), timeout=_FIND_OUT_S), type=Found)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise Unavailable(f"Ray node {name[:12]} does not say what it is made of: {error}") from error


def look_around() -> bytes:
    """Runs on the machine that is asked about."""
    machine = this_machine()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return msgspec.msgpack.encode(Found(boot, machine.cores, machine.gpus, machine.quota))


def _request_resources(bundles: Sequence[Mapping[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources

    try:
        request_resources(bundles=[dict(bundle) for bundle in bundles])
    except Exception as error:  # a cluster without an autoscaler, or one that is being started
        logger.warning("the autoscaler cannot be asked for machines: %s", error)
