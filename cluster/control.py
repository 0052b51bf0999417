"""What a controller answers to orders. Plain types, which commands show."""

from __future__ import annotations

import enum

import msgspec

from tandem.wire.forecasts import Forecast, ForecastScore, GradedForecast
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
    foresight: ForesightView | None = None  # None: this installation grades no forecasts


class Expectation(msgspec.Struct, frozen=True):
    """What other sizes are expected to bring. Neither a forecast nor a reason: nothing would change."""

    forecast: Forecast | None = None
    not_foretold: str = ""  # why
    said: str = ""  # either in one line


class CoresView(msgspec.Struct, frozen=True):
    """The cores of each role's nodes, as the machines would place them: now, and with other sizes. A role that is missing has cores, or
    devices, of its own."""

    now: dict[Role, list[frozenset[str]]]
    then: dict[Role, list[frozenset[str]]]


def not_foretold(why: str) -> Expectation:
    return Expectation(not_foretold=why, said=f"what it will bring is not foretold: {why}")


class ForesightView(msgspec.Struct, frozen=True):
    """What changes of sizes were expected to bring, and what came."""

    score: ForecastScore
    pending: Forecast | None = None  # of the last change, until it is graded
    graded: list[GradedForecast] = []  # the latest, oldest first


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
    sizes: dict[Role, int] = {}  # only pools whose size changes
