"""What an operator can ask of a running cluster, and what it answers. Plain types: the controller returns them, its actor
carries them as msgspec bytes, the commands show them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.base.logs import ClusterLogs, LogsQuery
from tandem.cluster.config import TandemConfig
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeStatus

DRAIN_S = 60.0  # how long a draining node may take for its requests, unless the operator sets another time


class SupervisedNode(msgspec.Struct, frozen=True):
    """A node as its supervisor knows it, including nodes that are starting, draining or left out."""

    node_id: str
    role: Role
    host: str  # the address of the machine that it runs on; "" while it waits for one
    phase: str
    detail: str  # the reason for the phase; for a "ready" node, why it was last restarted
    restarts: int
    status: NodeStatus | None = None  # the last one that it reported


class PoolView(msgspec.Struct, frozen=True):
    role: Role
    wanted: int
    ready: int
    min_nodes: int
    max_nodes: int  # 0: no limit
    waiting_for_machines: int = 0  # nodes for which no machine of the cluster has room


class RouterView(msgspec.Struct, frozen=True):
    name: str
    url: str
    phase: str
    detail: str
    restarts: int


class ControllerDecision(msgspec.Struct, frozen=True):
    """Something that the controller did by itself or on request, with its reason, in one line."""

    unix_time: float
    text: str


class ClusterEnd(msgspec.Struct, frozen=True):
    """Says that a cluster was told to end. Recorded before anything is ended. Without this record a cluster has not ended,
    however silent it is."""

    unix_time: float
    why: str  # what ordered the end, such as "`tandem down`"


class ClusterView(msgspec.Struct, frozen=True):
    model: str
    pools: list[PoolView]
    nodes: list[SupervisedNode]
    routers: list[RouterView]
    decisions: list[ControllerDecision]  # the latest, oldest first
    failure: str = ""  # why the controller no longer repairs this cluster
    revision: int = 0  # of the configuration with which new nodes start
    rollout: RolloutView | None = None
    paused: list[str] = []  # pools and nodes that get no new requests
    exchange: ExchangeView | None = None


class ExchangePhase(enum.StrEnum):
    CHECKING = "checking"  # whether the new controller can read the old one's state; the old one runs
    REPLACING = "replacing"
    RESTORING = "restoring"
    DONE = "done"
    FAILED = "failed"  # the old controller runs


class ExchangeView(msgspec.Struct, frozen=True):
    """The replacement of the controller by one with another environment: the current one or the last one."""

    id: str
    phase: ExchangePhase
    why: str = ""  # why the old controller stays

    @property
    def is_over(self) -> bool:
        return self.phase in (ExchangePhase.DONE, ExchangePhase.FAILED)


class RolloutView(msgspec.Struct, frozen=True):
    """Nodes, routers or both are being replaced by ones with another revision."""

    revision: int  # of the new nodes and routers
    replaced: int  # nodes and routers that serve with it
    left: list[str]  # nodes and routers that are still to be replaced
    unix_time: float  # of its beginning
    waits: str = ""  # what it is waiting for
    # Why the rollout is being taken back: nodes and routers get the old configuration again
    going_back: str = ""


class AppliedChange(msgspec.Struct, frozen=True):
    """What another configuration changes, as names of settings. It has no values, because one may be a key."""

    at_once: list[str]
    nodes: list[str]  # settings that nodes read at their start
    refused: list[str]  # settings that only a restart of the cluster changes
    replaced: list[str]  # names of the nodes and routers that are replaced, one after another
    revision: int  # that nodes have after the rollout
    routers: list[str] = []  # settings that routers read at their start
    controller: list[str] = []  # settings that the controller's process reads at its start
    exchange: str = ""  # the id of the controller's exchange, as a view shows it; "" if it is not exchanged


class Control(Protocol):
    """Every method raises errors of `base.errors` only, and has no effect the second time it is asked for the same."""

    async def view(self) -> ClusterView: ...

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        """Sets the sizes of these pools until the next change. Returns what will be done, one line each, once that is decided
        and recorded; `view` shows the progress. A pool that shrinks drains the nodes that it loses."""
        ...

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        """Drains the node and ends it; its pool shrinks by one. Returns True when the node's requests ended in time."""
        ...

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        """Empties the machine with this address, which is about to go away. Nothing new is placed there, its nodes are drained and
        ended while others start on other machines, and its router takes no new requests. Returns for each node whether its
        requests ended in time."""
        ...

    async def configuration(self) -> TandemConfig:
        """Returns the configuration as it is wanted now, which a rollout may not have completed yet."""
        ...

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        """Changes the configuration. What can change at once does. Nodes and routers that read a changed setting at their start
        are replaced one by one in the background; `view` shows the progress. Returns what changes, once it is recorded.
        `dry_run` returns the same and changes nothing."""
        ...

    async def go_back(self) -> None:
        """Takes back the running rollout: nodes and routers are replaced again, with the configuration from before it."""
        ...

    async def pause(self, names: list[str]) -> list[str]:
        """Gives these pools and nodes no new requests until they are resumed; without names, all pools. Running requests go on.
        While all decode and aggregated nodes are paused, new requests wait in the routers' lines. Returns the names of all that
        are paused now."""
        ...

    async def resume(self, names: list[str]) -> list[str]:
        """Ends the pauses of these names; without names, every pause. Returns the names that are still paused."""
        ...

    async def reset_cache(self, names: list[str]) -> list[str]:
        """Empties the prefix caches, in every tier, of these nodes and of all nodes of these pools; without names, of all nodes.
        Running requests keep their blocks. Returns the names of the nodes that did it. Raises Unavailable if one did not
        answer."""
        ...

    async def adapters(self, load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]:
        """Loads and unloads adapters on all nodes, or on none if that fails. Returns the location of every adapter by name once
        all routers serve them. Without arguments it only returns them. Raises ConfigurationError for an adapter that a node
        cannot serve."""
        ...

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        """Returns lines of the processes' logs, and for each process that did not answer the reason."""
        ...

    async def change_role(self, node_id: str, role: Role) -> None:
        """Drains the node and brings it back as a node of another role with the weights that it has loaded. The sizes of both
        pools change by one. Returns when it is ready in its new role."""
        ...
