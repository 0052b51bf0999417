"""What the controller records in its `StateStore`, so that the next controller finds every node again by its id; and the membership:
the nodes that routers may use, and the keys of all processes that may connect to each other.

Each is only ever replaced as a whole. So a router that missed ten changes needs only the last one, as a new router does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Container, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.base.settings import without_defaults
from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.control import ControllerDecision
from tandem.cluster.launcher import Host
from tandem.router.config import RouterConfig
from tandem.wire.endpoints import key_of
from tandem.wire.nodes import NodeInfo, Role, RouterInfo


class RankPlace(msgspec.Struct, frozen=True):
    """The part of a node on one of its other machines, if its ranks are on several."""

    host: str
    address: str
    cores: tuple[int, ...]
    device: str


class NodePlacement(msgspec.Struct, frozen=True):
    """Where a node runs. The node keeps its place through restarts and changes of role, as long as its machines stay."""

    host: str  # the machine's name
    address: str
    slot: Role  # the role whose place it takes on the machine: the one with which it was placed
    cores: tuple[int, ...]
    device: str
    memory_share: float  # of the free memory of its device
    others: tuple[RankPlace, ...] = ()  # its other machines; it takes a place of the same kind on each

    @property
    def parts(self) -> list[NodePlacement]:
        """Returns one placement per machine, as if a node were on that machine alone."""
        first = msgspec.structs.replace(self, others=())
        return [
            first,
            *(
                msgspec.structs.replace(
                    first, host=there.host, address=there.address, cores=there.cores, device=there.device
                )
                for there in self.others
            ),
        ]

    @property
    def hosts(self) -> list[str]:
        return [self.host, *(there.host for there in self.others)]


class NodeRecord(msgspec.Struct, frozen=True):
    node_id: str
    role: Role
    placement: NodePlacement | None = None  # None: it waits for a machine with room
    info: NodeInfo | None = None  # as it was last announced
    leaving: bool = False  # it drains, then ends
    revision: int = 0  # of the configuration with which it was started
    left_out: str = ""  # why it was left out; no controller starts it again until an operator asks for it

    def is_on(self, hosts: AbstractSet[str]) -> bool:
        return self.placement is not None and not hosts.isdisjoint(self.placement.hosts)

    def serving_as(self, info: NodeInfo) -> NodeRecord:
        return msgspec.structs.replace(self, info=info, left_out="")

    def out_of_use(self, reason: str) -> NodeRecord:
        return msgspec.structs.replace(self, info=None, left_out=reason)


class RouterRecord(msgspec.Struct, frozen=True):
    name: str
    place: str  # the address of the machine on which clients find it, "" for the head
    config: RouterConfig  # with which it was started
    info: RouterInfo | None = None  # as it last announced itself
    leaving: bool = False  # it finishes its requests, then ends


class ClosedSlot(msgspec.Struct, frozen=True):
    """A place that must stay empty until an operator sizes its pool: one whose node was removed from a pool without a fixed size, or whose
    device is broken."""

    host: str
    role: Role
    device: str = ""  # the broken device; "" where the machine offers places, of which one is closed


class Revision(msgspec.Struct, frozen=True):
    """A configuration with which nodes start, and the model that it names."""

    number: int = 0
    config: TandemConfig | None = None  # None: the one with which the controller's process was created
    # Of a model on the hub: the one for which its name stood when this configuration was applied
    commit: str = ""
    # The model's, as the revision's first node announced it; nodes with another content are refused
    content: str = ""
    adapters: dict[str, str] | None = None  # by name, if they were changed since; None: the configuration's


class Rollout(msgspec.Struct, frozen=True):
    """Nodes, routers or both are being replaced by ones with another configuration."""

    before: Revision  # that is being replaced
    unix_time: float
    going_back: str = ""  # why the rollout is being taken back; `before` is then the revision that failed
    nodes: bool = True  # whether nodes read a changed setting
    routers: bool = False


class ClusterState(msgspec.Struct, frozen=True):
    """Only replaced as a whole, never changed."""

    sizes: dict[Role, int | None]  # None: a node for every place that machines offer
    nodes: list[NodeRecord] = []
    next_index: dict[Role, int] = {}  # so that no id is given twice
    closed: list[ClosedSlot] = []
    revision: Revision = Revision()  # with which nodes start now
    last_number: int = 0  # so that no revision number is given twice
    rollout: Rollout | None = None
    evacuated: list[str] = []  # names of machines that are about to go; nothing is placed there
    paused: list[str] = []  # names of pools and nodes that get no new requests
    routers: list[RouterRecord] = []
    decisions: list[ControllerDecision] = []  # the latest, oldest first
    writer: str = ""  # the controller that recorded this
    wings: dict[str, bytes] = {}  # what wings keep for themselves, by their names

    def find(self, node_id: str) -> NodeRecord | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def known(self, node_id: str) -> NodeRecord:
        record = self.find(node_id)
        if record is None:
            ids = ", ".join(node.node_id for node in self.nodes) or "none"
            raise ConfigurationError(f"there is no node {node_id}; there are: {ids}")
        return record

    def revision_of(self, number: int) -> Revision | None:
        """Returns None for a revision of an earlier rollout."""
        known = [self.revision, *([self.rollout.before] if self.rollout is not None else [])]
        return next((each for each in known if each.number == number), None)

    def unseen_machines(self, seen: Container[str]) -> list[Host]:
        """Returns the machines outside `seen` on which nodes served, with places for those nodes only."""
        placements = [
            part
            for node in self.nodes
            if node.placement is not None and node.info is not None
            for part in node.placement.parts
        ]
        addresses = {there.host: there.address for there in placements if there.host not in seen}
        return [
            Host(name, address, slots=dict(Counter(there.slot for there in placements if there.host == name)))
            for name, address in addresses.items()
        ]

    def outdated(self, role: Role) -> list[NodeRecord]:
        """Returns the nodes of earlier revisions that stay until a new node takes their place."""
        return [node for node in self.staying(role) if node.revision != self.revision.number]

    def beginning(
        self,
        config: TandemConfig,
        commit: str,
        unix_time: float,
        adapters: dict[str, str] | None = None,
        *,
        nodes: bool,
        routers: bool,
    ) -> ClusterState:
        """Returns the state in which new nodes and routers start with this configuration, and the old ones that read a changed setting
        are to be replaced. `adapters` replaces the configuration's."""
        number = self.last_number + 1
        rollout = Rollout(self.revision, unix_time, nodes=nodes, routers=routers)
        content = "" if nodes else self.revision.content
        new = msgspec.structs.replace(self, last_number=number, rollout=rollout)
        return new._as_of(Revision(number, config, commit, content, adapters=adapters))

    def going_back(self, why: str) -> ClusterState:
        if self.rollout is None:
            return self
        rollout = msgspec.structs.replace(self.rollout, before=self.revision, going_back=why)
        return msgspec.structs.replace(self, rollout=rollout)._as_of(self.rollout.before)

    def _as_of(self, revision: Revision) -> ClusterState:
        """Makes this revision current. Nodes that read no changed setting count as nodes of it."""
        nodes = self.nodes
        if self.rollout is not None and not self.rollout.nodes:
            nodes = [msgspec.structs.replace(node, revision=revision.number) for node in nodes]
        return msgspec.structs.replace(self, revision=revision, nodes=nodes)

    def staying(self, role: Role) -> list[NodeRecord]:
        return [node for node in self.nodes if node.role is role and not node.leaving]

    def with_node(self, record: NodeRecord) -> ClusterState:
        """Replaces the record with the same id, or adds it."""
        if self.find(record.node_id) is None:
            nodes = [*self.nodes, record]
        else:
            nodes = [record if node.node_id == record.node_id else node for node in self.nodes]
        return msgspec.structs.replace(self, nodes=nodes)

    def with_new_node(self, role: Role) -> ClusterState:
        index = self.next_index.get(role, 0)
        state = self.with_node(NodeRecord(f"{role.value}-{index}", role, revision=self.revision.number))
        return msgspec.structs.replace(state, next_index=self.next_index | {role: index + 1})

    def without(self, node_id: str) -> ClusterState:
        return msgspec.structs.replace(
            self,
            nodes=[node for node in self.nodes if node.node_id != node_id],
            paused=[name for name in self.paused if name != node_id],
        )

    def releasing(self, record: NodeRecord) -> ClusterState:
        """Returns the state in which this node leaves and its pool is one smaller; in a pool with a node for each place, the place is closed."""
        new = self.with_node(msgspec.structs.replace(record, leaving=True))
        if new.sizes[record.role] is None and record.placement is not None:
            slots = [ClosedSlot(part.host, part.slot) for part in record.placement.parts]
            return msgspec.structs.replace(new, closed=[*new.closed, *slots])
        return new.resized(record.role, -1)

    def evacuating(self, hosts: AbstractSet[str], present: Collection[str]) -> ClusterState:
        """Returns the state in which the nodes on these machines leave and their pools keep their sizes. Forgets machines that are gone."""
        nodes = [msgspec.structs.replace(node, leaving=True) if node.is_on(hosts) else node for node in self.nodes]
        known = [name for name in self.evacuated if name in present and name not in hosts]
        return msgspec.structs.replace(self, nodes=nodes, evacuated=[*known, *hosts])

    @property
    def staying_routers(self) -> list[RouterRecord]:
        return [router for router in self.routers if not router.leaving]

    def router(self, name: str) -> RouterRecord | None:
        return next((router for router in self.routers if router.name == name), None)

    def with_router(self, record: RouterRecord) -> ClusterState:
        """Replaces the record with the same name, or adds it."""
        if self.router(record.name) is None:
            routers = [*self.routers, record]
        else:
            routers = [record if router.name == record.name else router for router in self.routers]
        return msgspec.structs.replace(self, routers=routers)

    def without_router(self, name: str) -> ClusterState:
        return msgspec.structs.replace(self, routers=[router for router in self.routers if router.name != name])

    def with_sizes(self, sizes: Mapping[Role, int | None]) -> ClusterState:
        closed = [slot for slot in self.closed if slot.role not in sizes]
        return msgspec.structs.replace(self, sizes={**self.sizes, **sizes}, closed=closed)

    def resized(self, role: Role, by: int) -> ClusterState:
        """Changes nothing for a pool that follows the machines, because it has no size."""
        size = self.sizes[role]
        return self if size is None else self.with_sizes({role: size + by})


def first_state(pools: PoolsConfig) -> ClusterState:
    return ClusterState(sizes={role: pools.of(role).nodes for role in Role})


def encode(state: ClusterState) -> bytes:
    """Encodes without defaults, so that the previous version of Tandem can read it unless it uses a setting that version lacks."""
    return msgspec.msgpack.encode(without_defaults(state))


def decode(data: bytes) -> ClusterState:
    """Raises UnknownState."""
    try:
        return msgspec.msgpack.decode(data, type=ClusterState)
    except msgspec.DecodeError as error:
        raise UnknownState(
            f"the state that an earlier controller recorded cannot be read by this version of Tandem ({error}): its nodes and routers "
            "go on serving; set `controller.env` so that the controller runs the version that recorded it"
        ) from error


class UnknownState(Unavailable):
    """Another version of Tandem recorded the state. It is not overwritten."""


class Membership:
    """The nodes and routers of the deployment. A draining process is in `members` and `keys`, an ended one in neither."""

    def __init__(self) -> None:
        self._members: dict[str, NodeInfo] = {}
        self._routers: dict[str, RouterInfo] = {}
        self._changed = asyncio.Condition()
        self.paused: list[str] = []  # names of pools and nodes that get no new requests
        self.revision = 0

    @property
    def members(self) -> list[NodeInfo]:
        return list(self._members.values())

    @property
    def keys(self) -> list[str]:
        """Returns the public keys of all nodes and routers, which each of them must admit."""
        nodes = [info.request_endpoint for info in self._members.values()]
        routers = [info.inbox_endpoint for info in self._routers.values()]
        return sorted(map(key_of, nodes + routers))

    async def pause(self, names: list[str]) -> None:
        if self.paused != names:
            self.paused = names
            await self._publish()

    async def announce_router(self, name: str, info: RouterInfo) -> None:
        if self._routers.get(name) != info:
            self._routers[name] = info
            await self._publish()

    async def withdraw_router(self, name: str) -> None:
        if self._routers.pop(name, None) is not None:
            await self._publish()

    async def announce(self, info: NodeInfo) -> None:
        if self._members.get(info.node_id) != info:
            self._members[info.node_id] = info
            await self._publish()

    async def withdraw(self, info: NodeInfo) -> None:
        """Does nothing if another incarnation with the same id has been announced."""
        if self._members.get(info.node_id) == info:
            del self._members[info.node_id]
            await self._publish()

    async def _publish(self) -> None:
        self.revision += 1
        async with self._changed:
            self._changed.notify_all()

    async def newer_than(self, revision: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.revision > revision)
            return self.revision
