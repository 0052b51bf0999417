"""The machines of a Ray cluster, and what the controller asks Ray's autoscaler for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.launcher import Host, Needs, Offer, StateStore, TakenPlace
from tandem.cluster.on_ray.runtime import HEAD_ONLY, joined_ray
from tandem.cluster.pools.placement import MachineFacts, share_cores, this_machine
from tandem.cluster.pools.room import needed_by, places, places_left
from tandem.cluster.pools.state import NodePlacement
from tandem.cluster.tasks import cancel
from tandem.wire.nodes import Role

if TYPE_CHECKING:
    from tandem.cluster.on_ray.neighbours import Neighbours

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0  # Ray does not announce changes of its nodes, so they are polled
# Labels of a machine that say with which others it is: the first that it has. Ray sets the second where it knows the zone.
ISLAND_LABELS = ("tandem-island", "ray.io/availability-zone")
_FIND_OUT_S = 60.0  # Ray first has to start a process on the machine
_ASK_AGAIN_S = 10.0
# How long `present` waits for the answers of new machines; a later answer counts at the next look
_WAIT_FOR_NEW_S = 10.0

FindOut = Callable[[str], Awaitable[MachineFacts]]
"""Asks the Ray node with this id for its cores, GPUs and quota."""


class HostRecord(msgspec.Struct, frozen=True):
    """What the controller keeps of a machine, so that it need not ask again after a restart and gives the same cores."""

    found: MachineFacts
    cores: tuple[int, ...]


class RayHosts:
    """Implements `cluster.launcher.Hosts` for a Ray cluster: a host is every Ray node that offers a role's resource.

    `needs` says what one node of a role takes besides that resource, such as {"GPU": 1}, and which labels its machine must
    have; `use` replaces it. Only machines with those labels count. Places and cores that nodes of other deployments have
    taken are not offered.
    """

    def __init__(
        self,
        store: StateStore,
        needs: Needs,
        nodes: Callable[[], list[dict[str, Any]]] | None = None,
        find_out: FindOut | None = None,
        request: Callable[[list[Offer]], None] | None = None,
        look_again_s: float = LOOK_AGAIN_S,
        ask_again_s: float = _ASK_AGAIN_S,
        wait_for_new_s: float = _WAIT_FOR_NEW_S,
        say: Callable[[str], None] = logger.warning,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._store = store
        self._needs = needs
        self._taken: dict[str, list[TakenPlace]] = {}  # by the machine's name
        self._nodes = nodes or ray_nodes
        self._find_out = find_out or _ask_ray_node
        self._request = request or _request_resources
        self._look_again_s = look_again_s
        self._ask_again_s = ask_again_s
        self._wait_for_new_s = wait_for_new_s
        self._say = say
        self._neighbours = neighbours
        self._theirs: list[NodePlacement] = []  # of the other deployments' nodes
        self._known: dict[str, HostRecord] | None = None  # what the store holds; None until it was read
        self._found: dict[str, MachineFacts] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._late: set[str] = set()  # machines for whose answers `present` no longer waits
        self._ask_after: dict[str, float] = {}
        # The last reason that was reported for a machine, so that it is reported once
        self._complaints: dict[str, str] = {}
        self._returned: frozenset[str] = frozenset()
        self._wanted: list[Offer] | None = None

    def use(self, needs: Needs, taken: Sequence[TakenPlace]) -> None:
        self._needs = needs
        self._taken = {}
        for place in taken:
            self._taken.setdefault(place.host, []).append(place)

    async def present(self) -> list[Host]:
        there = await self._look()
        new = self._asking.keys() - self._late
        if new:
            await asyncio.wait([self._asking[name] for name in new], timeout=self._wait_for_new_s)
            self._late |= new
        cores = await self._share()
        hosts = [
            msgspec.structs.replace(host, cores=self._left_of(name, cores[name]), gpus=self._found[name].gpus)
            if host.slots
            else host
            for name, host in there.items()
            if name in cores or not host.slots  # a machine that answered just now comes with the next look
        ]
        self._returned = frozenset(host.name for host in hosts)
        return hosts

    def placing(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self._neighbours is None else self._neighbours.placing()

    def _left_of(self, name: str, cores: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the cores that no node of another deployment is bound to; all of them if that leaves none."""
        taken = {core for placement in self._theirs if placement.host == name for core in placement.cores}
        return tuple(core for core in cores if core not in taken) or cores

    def _is_ready(self, host: Host) -> bool:
        """A head that offers no place is ready without an answer: no node will be bound to its cores."""
        return not host.slots or host.name in self._found

    async def _look(self) -> dict[str, Host]:
        """Returns the machines of the cluster, and starts to ask each new one for its facts without waiting for the answer."""
        if self._known is None:
            kept = await self._store.load()
            self._known = msgspec.msgpack.decode(kept, type=dict[str, HostRecord]) if kept else {}
            self._found = {name: known.found for name, known in self._known.items()}
        there = await self._places()
        self._found = {name: found for name, found in self._found.items() if name in there}
        for task in [task for name, task in self._asking.items() if name not in there]:
            await cancel(task)
        self._late &= there.keys()
        now = asyncio.get_running_loop().time()
        for name, host in there.items():
            asked = name in self._asking or self._ask_after.get(name, now) > now
            if not self._is_ready(host) and not asked:
                task = asyncio.create_task(self._ask(host), name=f"ask {host.address}")
                self._asking[name] = task
                task.add_done_callback(functools.partial(self._forget_asking, name))
        return there

    def _forget_asking(self, name: str, task: asyncio.Task[None]) -> None:
        self._asking.pop(name, None)

    async def _ask(self, host: Host) -> None:
        try:
            self._found[host.name] = await self._find_out(host.name)
        except TandemError as error:
            why = f"the machine {host.address} gets no nodes: it did not report its cores and GPUs: {error}"
            if self._complaints.get(host.name) != why:
                self._complaints[host.name] = why
                self._say(why)
            self._ask_after[host.name] = asyncio.get_running_loop().time() + self._ask_again_s

    async def _places(self) -> dict[str, Host]:
        """Returns the hosts by name, ordered by address, without their cores and GPUs: only the machines know those."""
        nodes = [node for node in await asyncio.to_thread(self._nodes) if node["Alive"]]
        nodes.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        self._theirs = [] if self._neighbours is None else await self._neighbours.placements()
        taken = Counter((placement.host, placement.slot) for placement in self._theirs)
        hosts = [
            Host(
                name=node["NodeID"],
                address=node["NodeManagerAddress"],
                slots=self._room(node, taken),
                head=any(name in node["Resources"] for name in HEAD_ONLY),
                fits=frozenset(places(offer_of(node), self._needs)),
                island=next(filter(None, map(offer_of(node).labels.get, ISLAND_LABELS)), ""),
            )
            for node in nodes
        ]
        return {host.name: host for host in hosts if host.slots or host.head}

    def _room(self, node: Mapping[str, Any], theirs: Counter[tuple[str, Role]]) -> dict[Role, int]:
        """Returns how many nodes of each role this deployment may have on the machine, those that it has there included."""
        name = node["NodeID"]
        mine = self._taken.get(name, ())
        own = Counter(place.slot for place in mine)
        room = places_left(offer_of(node), self._needs, mine)
        left = {role: max(own[role], count - theirs[name, role]) for role, count in room.items()}
        return {role: count for role, count in left.items() if count > 0}

    async def _share(self) -> dict[str, tuple[int, ...]]:
        given = {name: known.cores for name, known in (self._known or {}).items()}
        shares = share_cores(self._found, given)
        known = {name: HostRecord(self._found[name], cores) for name, cores in shares.items()}
        if known != self._known:
            await self._store.save(msgspec.msgpack.encode(known))
            self._known = known
        return shares

    async def changed(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, self._look_again_s))
            there = await self._look()
            if frozenset(name for name, host in there.items() if self._is_ready(host)) != self._returned:
                return

    async def want(self, slots: dict[Role, int]) -> None:
        """For a node that has a place the request repeats what it was placed with; `needs` may have changed since."""
        bundles: list[Offer] = []
        for role in Role:
            there = [place.needed for each in self._taken.values() for place in each if place.slot is role]
            there = there[: slots.get(role, 0)]
            bundles += [*there, *([needed_by(role, self._needs)] * (slots.get(role, 0) - len(there)))]
        if self._neighbours is not None:
            bundles = await self._neighbours.with_wanted(bundles)
        if bundles == self._wanted:
            return
        try:
            await asyncio.to_thread(self._request, bundles)
        except Exception as error:  # Ray's; the cluster may be just starting. The controller asks again
            logger.warning("Ray's autoscaler did not take the request for machines: %s", error)
        else:
            self._wanted = bundles


def offer_of(node: Mapping[str, Any]) -> Offer:
    """Returns a machine's resources and labels as Ray reports them."""
    return Offer(node["Resources"], node.get("Labels", {}))


def ray_nodes() -> list[dict[str, Any]]:
    ray = joined_ray()
    try:
        nodes: list[dict[str, Any]] = ray.nodes()
    except ray.exceptions.RayError as error:
        raise Unavailable(f"Ray did not list the cluster's machines: {error}") from error
    return nodes


async def _ask_ray_node(name: str) -> MachineFacts:
    ray = joined_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tandem.cluster.on_ray.errors import answer

    task = ray.remote(num_cpus=0, max_retries=0)(look_around)
    placed = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=name, soft=False))
    told = await asyncio.to_thread(placed.remote)
    try:
        return msgspec.msgpack.decode(await asyncio.wait_for(answer(told), _FIND_OUT_S), type=MachineFacts)
    except TimeoutError as error:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(told, force=True)
        raise Unavailable(f"no process on it answered within {_FIND_OUT_S:.0f} s") from error
    except TandemError as error:
        last = str(error).strip().splitlines()[-1:]
        raise Unavailable(f"{''.join(last)} (the same version of Tandem must be installed there as here)") from error
    except msgspec.DecodeError as error:
        raise Unavailable(f"another version of Tandem is installed there than here: {error}") from error


def look_around() -> bytes:
    """Returns the encoded MachineFacts of the machine on which this runs."""
    machine = this_machine()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return msgspec.msgpack.encode(MachineFacts(boot, machine.cores, machine.gpus, machine.quota))


def _request_resources(bundles: Sequence[Offer]) -> None:
    from ray.autoscaler.sdk import request_resources

    labels = [bundle.labels for bundle in bundles]
    request_resources(
        bundles=[bundle.resources for bundle in bundles], bundle_label_selectors=labels if any(labels) else None
    )
