"""What can be asked of a running cluster, and what it tells about itself. Plain types: the controller answers with
them, its actor carries them as msgspec bytes, the commands show them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.cluster.config import TandemConfig
from tandem.wire.logs import ClusterLogs, LogsQuery
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeStatus

DRAIN_S = 60.0  # for a node to finish what it has, unless the operator says otherwise


class SupervisedNode(msgspec.Struct, frozen=True):
    """A node as its supervisor knows it; also one that is starting, being drained or left out."""

    node_id: str
    role: Role
    host: str  # the address of the machine that it runs on; "" while it waits for one
    phase: str
    detail: str  # why; of one that is "ready", why it was last started again
    restarts: int
    status: NodeStatus | None = None  # its last answer


class PoolView(msgspec.Struct, frozen=True):
    role: Role
    wanted: int
    ready: int
    min_nodes: int
    max_nodes: int  # 0: no limit
    waiting_for_machines: int = 0  # nodes that no machine of the cluster has room for


class RouterView(msgspec.Struct, frozen=True):
    name: str
    url: str
    phase: str
    detail: str
    restarts: int


class ControllerDecision(msgspec.Struct, frozen=True):
    """Something that the controller did by itself or was told to do, with its reason, in one line."""

    unix_time: float
    text: str


class ClusterEnd(msgspec.Struct, frozen=True):
    """A cluster was told to end. Recorded before anything is ended; nothing else is an end, and no silence."""

    unix_time: float
    why: str  # what has ended it: "`tandem down`"


class ClusterView(msgspec.Struct, frozen=True):
    model: str
    pools: list[PoolView]
    nodes: list[SupervisedNode]
    routers: list[RouterView]
    decisions: list[ControllerDecision]  # the latest ones, oldest first
    failure: str = ""  # why this cluster is not mended any more
    revision: int = 0  # of the configuration that nodes are made with
    rollout: RolloutView | None = None
    paused: list[str] = []  # pools and nodes that get no new requests
    exchange: ExchangeView | None = None


class ExchangePhase(enum.StrEnum):
    CHECKING = "checking"  # whether the new one understands what the old one keeps; the old one runs
    REPLACING = "replacing"
    RESTORING = "restoring"
    DONE = "done"
    FAILED = "failed"  # the old one runs


class ExchangeView(msgspec.Struct, frozen=True):
    """A controller that takes the place of one with another environment, or the last time that one did."""

    id: str
    phase: ExchangePhase
    why: str = ""  # the old one stays

    @property
    def is_over(self) -> bool:
        return self.phase in (ExchangePhase.DONE, ExchangePhase.FAILED)


class RolloutView(msgspec.Struct, frozen=True):
    """Nodes, routers or both are being replaced."""

    revision: int  # that the new nodes have
    replaced: int  # nodes and routers that serve with it
    left: list[str]  # nodes and routers that are to go
    unix_time: float  # of its beginning
    waits: str = ""  # for what
    going_back: str = ""  # why; then it is the old configuration that is made again


class AppliedChange(msgspec.Struct, frozen=True):
    """What another configuration changes, by the names of settings; no values, for one may hold a key."""

    at_once: list[str]
    nodes: list[str]  # nodes read it when they start
    refused: list[str]  # only a new start of the cluster takes it on
    replaced: list[str]  # the nodes and routers that are replaced, one after another
    revision: int  # that nodes have when it is done
    routers: list[str] = []  # routers read it when they start
    controller: list[str] = []  # the controller's process reads it when it starts
    exchange: str = ""  # of the controller for another one: its id, in a view


class Control(Protocol):
    """Every method raises errors of `wire.errors` only. What is asked for twice is done once."""

    async def view(self) -> ClusterView: ...

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        """The new sizes of these pools, until they are changed again. Returns what will be done, a line each, once
        it is decided and kept; the doing shows in `view`. A pool that shrinks drains the nodes that it loses."""
        ...

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        """The node takes nothing new, finishes what it has, and goes; its pool shrinks by one. True when all of its
        work ended in time."""
        ...

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        """The machine with this address is about to go: nothing is placed there any more, its nodes are drained and go, others take
        their places on other machines, and its router takes nothing new. Whether each node finished all that it had."""
        ...

    async def configuration(self) -> TandemConfig:
        """As it is wished for now."""
        ...

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        """What can be changed at once, is; nodes and routers that read what is different are replaced one by one, in the background: `view` tells
        how far that is. Returns what changes, once it is kept. `dry_run`: without changing it."""
        ...

    async def go_back(self) -> None:
        """What a rollout has replaced is replaced again, with the configuration from before."""
        ...

    async def pause(self, names: list[str]) -> list[str]:
        """These pools and nodes, by name, get no new requests until they are resumed; no name: all pools. What runs there goes on. When
        all nodes that write answers are paused, requests wait in the routers' lines. Returns all that are paused now."""
        ...

    async def resume(self, names: list[str]) -> list[str]:
        """Ends a pause of the same names; no name: every pause. Returns what is still paused."""
        ...

    async def reset_cache(self, names: list[str]) -> list[str]:
        """Nodes of these pools, or by their own names, empty their prefix caches, in every tier; no name: all. Requests that run keep
        their blocks. Returns the nodes that did; raises Unavailable when one did not answer."""
        ...

    async def adapters(self, load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]:
        """Adapters that clients may name besides or no longer, on every node or on none: where each is, by name. Returns all that there
        are then, once routers serve it; nothing to do: what there is. Raises ConfigurationError for one that a node cannot serve."""
        ...

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        """Lines of processes' logs. One that does not answer is among the silent ones, with the reason."""
        ...

    async def change_role(self, node_id: str, role: Role) -> None:
        """Drains the node and brings it back in another pool with the weights that it has loaded. The two pools'
        sizes change by one. Returns when it is ready in its new role."""
        ...
