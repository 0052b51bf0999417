"""What may be ordered of a running cluster: one table, for commands, which reach the controller through Ray or through a router, and for
a router's `/admin`, which passes JSON on."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from tandem.base.errors import ConfigurationError, InvalidRequest, RequestError
from tandem.base.logs import ClusterLogs, LogsQuery
from tandem.base.settings import LONGEST_S, without_defaults
from tandem.cluster.config import ClusterTimeouts, NodeCount, TandemConfig
from tandem.cluster.control import DRAIN_S, AppliedChange, ClusterView, CoresView, Expectation
from tandem.wire.nodes import Role

# For orders that make nodes load. The controller ends a process without progress (`timeouts.start_s`); this limit is for a lost answer.
LOADING_S = 24 * 3600.0
FORETELL_S = 12.0  # until a forecast is given up

T = TypeVar("T")


class UnknownAction(RequestError):
    code = "not_found"
    http_status = 404


class Control(Protocol):
    """A controller, as orders use it. Every method raises errors of `base.errors` only, and has no effect the second time it is asked
    for the same."""

    async def view(self) -> ClusterView: ...
    async def configuration(self) -> TandemConfig:
        """Returns the configuration as it is wanted now, which a rollout may not have completed yet."""

    async def scale(self, wanted: dict[Role, int]) -> list[str]: ...
    async def foretell(self, wanted: dict[Role, int]) -> Expectation: ...
    async def cores(self, wanted: dict[Role, int]) -> CoresView: ...
    async def drain_node(self, node_id: str, timeout_s: float) -> bool: ...
    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]: ...
    async def change_role(self, node_id: str, role: Role) -> None: ...
    async def pause(self, names: list[str]) -> list[str]: ...
    async def resume(self, names: list[str]) -> list[str]: ...
    async def reset_cache(self, names: list[str]) -> list[str]: ...
    async def adapters(self, load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]: ...
    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange: ...
    async def go_back(self) -> None: ...
    async def logs(self, query: LogsQuery) -> ClusterLogs: ...


class Order(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    """Its fields are the body of the action, and `T` is its answer."""

    action: ClassVar[str]
    key: ClassVar[str] = ""  # under which the answer stands in JSON; "": the answer is all of it

    @property
    def limit_s(self) -> float:
        """How long it may take, beyond the time in which a controller answers."""
        return 0.0

    @abc.abstractmethod
    async def do(self, control: Control) -> T: ...

    def body(self) -> bytes:
        return msgspec.json.encode(without_defaults(self))

    def encoded(self, answer: T) -> bytes:
        return msgspec.json.encode({self.key: answer} if self.key else answer)

    def decoded(self, answer: bytes) -> T:
        """Raises msgspec.DecodeError."""
        bases = getattr(type(self), "__orig_bases__", ())
        kind: Any = next(get_args(base)[0] for base in bases if get_origin(base) is Order)
        told: Any = msgspec.json.decode(answer, type=dict[str, kind] if self.key else kind)
        if self.key and self.key not in told:
            raise msgspec.ValidationError(f"Object missing required field `{self.key}`")
        return cast("T", told[self.key] if self.key else told)


class OperatedCluster(Protocol):
    """A running cluster as commands use it. Raises errors of `base.errors` only."""

    async def ask(self, order: Order[T]) -> T: ...


class ViewOrder(Order[ClusterView], frozen=True):
    """Returns the controller's view of the cluster."""

    action = "view"

    async def do(self, control: Control) -> ClusterView:
        return await control.view()


class TimeoutsOrder(Order[ClusterTimeouts], frozen=True):
    """Returns the cluster's time-outs."""

    action = "timeouts"

    async def do(self, control: Control) -> ClusterTimeouts:
        return (await control.configuration()).timeouts


class ConfigurationOrder(Order[TandemConfig], frozen=True):
    """Returns the configuration as it is wanted now, without keys: what a simulation of the cluster needs."""

    action = "configuration"

    async def do(self, control: Control) -> TandemConfig:
        config = await control.configuration()
        return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, api_keys=()))

    def encoded(self, answer: TandemConfig) -> bytes:
        return msgspec.json.encode(without_defaults(answer))


class ScaleOrder(Order[list[str]], frozen=True):
    """Sets the sizes of these pools until the next change. Returns what will be done, one line each, once that is decided and
    recorded; the view shows the progress. A pool that shrinks drains the nodes that it loses."""

    action = "scale"
    key = "changes"
    pools: dict[Role, NodeCount]

    async def do(self, control: Control) -> list[str]:
        return await control.scale(self.pools)


class ForetellOrder(Order[Expectation], frozen=True):
    """Says what these sizes of the pools are expected to bring, within seconds, and changes nothing. A change to them that is ordered
    within a minute is graded by that."""

    action = "foretell"
    pools: dict[Role, NodeCount]

    @property
    def limit_s(self) -> float:
        return FORETELL_S

    async def do(self, control: Control) -> Expectation:
        return await control.foretell(self.pools)


class CoresOrder(Order[CoresView], frozen=True):
    """Says which cores nodes share, and would share with these sizes of the pools: what `tandem what-if` cannot know of machines. Changes
    nothing."""

    action = "cores"
    pools: dict[Role, NodeCount]

    async def do(self, control: Control) -> CoresView:
        return await control.cores(self.pools)


class DrainOrder(Order[bool], frozen=True):
    """Drains the node and ends it; its pool shrinks by one. Returns True when the node's requests ended in time."""

    action = "drain"
    key = "finished"
    node: str
    timeout_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = DRAIN_S

    @property
    def limit_s(self) -> float:
        return self.timeout_s

    async def do(self, control: Control) -> bool:
        return await control.drain_node(self.node, self.timeout_s)


class EvacuateOrder(Order[dict[str, bool]], frozen=True):
    """Empties the machine with this address, which is about to go away. Nothing new is placed there, its nodes are drained and ended
    while others start on other machines, and its router takes no new requests. Returns for each node whether its requests ended in
    time."""

    action = "evacuate"
    key = "finished"
    machine: str
    timeout_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = DRAIN_S

    @property
    def limit_s(self) -> float:
        return self.timeout_s

    async def do(self, control: Control) -> dict[str, bool]:
        return await control.evacuate(self.machine, self.timeout_s)


class ChangeRoleOrder(Order[dict[str, str]], frozen=True):
    """Drains the node and brings it back as a node of another role with the weights that it has loaded. The sizes of both pools change
    by one. Returns when it is ready in its new role. A node that has this role already, and was left out, is tried again."""

    action = "role"
    node: str
    role: Role

    @property
    def limit_s(self) -> float:
        return LOADING_S

    async def do(self, control: Control) -> dict[str, str]:
        await control.change_role(self.node, self.role)
        return {"node": self.node, "role": self.role.value}


class PauseOrder(Order[list[str]], frozen=True):
    """Gives these pools and nodes no new requests until they are resumed; without names, all pools. Running requests go on. While all
    decode and aggregated nodes are paused, new requests wait in the routers' lines. Returns the names of all that are paused now."""

    action = "pause"
    key = "paused"
    names: list[str] = []

    async def do(self, control: Control) -> list[str]:
        return await control.pause(self.names)


class ResumeOrder(Order[list[str]], frozen=True):
    """Ends the pauses of these names; without names, every pause. Returns the names that are still paused."""

    action = "resume"
    key = "paused"
    names: list[str] = []

    async def do(self, control: Control) -> list[str]:
        return await control.resume(self.names)


class ResetCacheOrder(Order[list[str]], frozen=True):
    """Empties the prefix caches, in every tier, of these nodes and of all nodes of these pools; without names, of all nodes. Running
    requests keep their blocks. Returns the names of the nodes that did it. Raises Unavailable if one did not answer."""

    action = "reset_prefix_cache"
    key = "reset"
    names: list[str] = []

    @property
    def limit_s(self) -> float:
        return 30.0  # a node empties its cache between two steps

    async def do(self, control: Control) -> list[str]:
        return await control.reset_cache(self.names)


class AdaptersOrder(Order[dict[str, str]], frozen=True):
    """Loads and unloads LoRA adapters on all nodes, or on none if that fails. `load` maps names to locations: a folder's absolute path,
    or owner/name on the hub. Returns the location of every adapter by name once all routers serve them. Without arguments it only
    returns them. Raises ConfigurationError for an adapter that a node cannot serve."""

    action = "adapters"
    key = "adapters"
    load: dict[str, str] = {}
    unload: list[str] = []

    @property
    def limit_s(self) -> float:
        return LOADING_S

    async def do(self, control: Control) -> dict[str, str]:
        return await control.adapters(self.load, self.unload)


class ApplyOrder(Order[AppliedChange], frozen=True):
    """Changes the configuration. What can change at once does. Nodes and routers that read a changed setting at their start are replaced
    one by one in the background; the view shows the progress. Returns what changes, once it is recorded. `dry_run` returns the same and
    changes nothing. `config` has every setting that is not the default, as tandem.yaml does, and the settings that follow from the
    model."""

    action = "apply"
    config: TandemConfig
    dry_run: bool = False

    async def do(self, control: Control) -> AppliedChange:
        return await control.apply(self.config, dry_run=self.dry_run)


class GoBackOrder(Order[dict[str, str]], frozen=True):
    """Takes back the running rollout: nodes and routers are replaced again, with the configuration from before it."""

    action = "go_back"

    async def do(self, control: Control) -> dict[str, str]:
        await control.go_back()
        return {}


class LogsOrder(LogsQuery, Order[ClusterLogs], frozen=True):
    """Returns log lines that the processes still keep, and for each process that did not answer the reason."""

    action = "logs"

    async def do(self, control: Control) -> ClusterLogs:
        return await control.logs(self)


ORDERS: dict[str, type[Order[Any]]] = {
    order.action: order
    for order in (
        ViewOrder, TimeoutsOrder, ConfigurationOrder, ScaleOrder, ForetellOrder, CoresOrder, DrainOrder, EvacuateOrder, ChangeRoleOrder, PauseOrder, ResumeOrder, ResetCacheOrder,
        AdaptersOrder, ApplyOrder, GoBackOrder, LogsOrder,
    )
}  # fmt: skip


def read_order(action: str, body: bytes) -> Order[Any]:
    """Raises UnknownAction, or InvalidRequest for a body that the action cannot have."""
    if action not in ORDERS:
        raise UnknownAction(f"there is no action {action[:100]!r}: it must be one of {', '.join(ORDERS)}")
    try:
        order: Order[Any] = msgspec.json.decode(body or b"{}", type=ORDERS[action])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{action}: {error}") from error
    return order


async def act(do: Callable[[Order[Any]], Awaitable[Any]], action: str, body: bytes) -> bytes:
    """Carries out one action, JSON in and out. What is refused as a configuration error is an InvalidRequest here."""
    order = read_order(action, body)
    try:
        return order.encoded(await do(order))
    except ConfigurationError as error:
        raise InvalidRequest(str(error)) from error
