"""The contracts for machines and for the processes on them, as the controller uses them. `on_ray` implements them; so do the
tests' fakes.

A handle stands for one incarnation of one process: once it has ended it stays ended, and a replacement has a new handle. A
launcher adopts a process that already runs under the name with the same configuration. So a restarted controller gets back
its nodes, and their requests go on.

Every method raises errors of `base.errors` only; `stop` raises nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import msgspec

from tandem.base.logs import LogPage, LogPosition
from tandem.base.progress import Report
from tandem.cluster.config import TandemConfig
from tandem.node.config import NodeConfig
from tandem.router.config import RouterConfig
from tandem.wire.forecasts import ForecastScore, MeasuredRequest
from tandem.wire.nodes import NodeInfo, NodeSighting, PoolReport, Role, RouterInfo, RouterQueue
from tandem.wire.requests import NodeStatus

FixModel = Callable[[TandemConfig, str], Awaitable[tuple[TandemConfig, str]]]
"""Replaces the name of the model in the configuration by one commit, so that every node loads the same. Returns the
configuration and the commit. The second argument is the commit to use; "" asks for the current one. A model without commits
returns ""."""

Ready = TypeVar("Ready", covariant=True)

Confirm = Callable[[], Awaitable[None]]
"""Returns once this controller is certainly the latest one of its deployment; never if it is not."""


class LogSource(Protocol):
    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        """Returns up to `most` lines of the process's log: those after `after`, or the `last` lines when it is None."""


class Handle(LogSource, Protocol[Ready]):
    async def start(self, report: Report) -> Ready:
        """Returns when the process can take work. Raises ConfigurationError when another try would fail in the same way."""

    async def ended(self) -> str:
        """Returns the reason once the process has certainly ended. A node on several machines has ended when the first of its
        processes has, because the others are useless without it."""

    async def stop(self) -> None:
        """Ends the process and all that belong to it: asks them to stop first, then kills them. Returns when they have ended.
        One that an earlier controller started is left if it cannot be reached: `Launcher.end` ends that. Idempotent."""


class NodeHandle(Handle[NodeInfo], Protocol):
    @property
    def keepers(self) -> Mapping[str, LogSource]:
        """The processes that keep its ranks on other machines, by name."""

    async def admit(self, keys: list[str]) -> None:
        """Sets the public keys of the processes that may connect to the node. Replaces the previous list."""

    async def status(self) -> NodeStatus: ...

    async def routers_heard(self) -> list[str]:
        """Returns the endpoints of the routers that the node heard from lately."""

    async def drain(self, timeout_s: float) -> bool:
        """The node refuses new requests from now on. Returns True when its requests ended in time."""

    async def reset_cache(self, timeout_s: float) -> bool:
        """Empties the prefix cache in every tier: requests that arrive after this reuse none of the KV that is cached now.
        Returns False if the node could not do it in time."""

    async def set_adapters(self, wanted: Mapping[str, str], timeout_s: float, report: Report) -> dict[str, str]:
        """Makes exactly the adapters in `wanted` (name: location) available to new requests. Returns their digests by name.
        Raises ConfigurationError for an adapter that the node cannot serve; then nothing has changed."""

    async def change_role(self, config: NodeConfig, report: Report) -> NodeInfo:
        """Turns the node into one of another role with the weights that it has loaded. It gets a new epoch and new addresses.
        Raises Unavailable unless a `drain` has completed."""


class RouterHandle(Handle[RouterInfo], Protocol):
    async def set_members(
        self, members: list[NodeInfo], paused: Sequence[str], desks: Mapping[str, str], pools: Sequence[PoolReport]
    ) -> RouterQueue:
        """Sets all nodes that the router may use; a node that is missing has ended. Processes that are not members cannot talk to
        the router. `paused` names the pools and nodes that get no new requests. `desks` gives, by name, the address of each
        router process on its port, its own included. `pools` is what the router shows of its pools. Returns what waits in the
        router's line."""

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        """Tells the router that the prefix caches of these nodes are empty."""

    async def follow_forecasts(self, score: ForecastScore, ended_within_s: float) -> list[MeasuredRequest]:
        """Has the router show this score from now on. Returns what requests took that it answered within the last seconds."""

    async def recalled(self) -> bytes:
        """Returns what the router remembers of its last requests, and what its nodes have learnt, for the simulator; b"" if it cannot say."""

    async def nodes_heard(self) -> list[NodeSighting]:
        """Returns for each node when the router last heard from it."""

    async def answers_clients(self) -> bool:
        """Returns whether the router answers HTTP at its URL, which takes another path than every other method here."""

    async def drain(self, timeout_s: float) -> bool: ...

    async def leave(self, timeout_s: float) -> bool:
        """For a router whose listening socket another router has taken: it accepts no new connection. Returns True when its
        requests ended in time."""


class Launcher(Protocol):
    """Launching returns at once; whatever fails raises in the handle's `start`. It may take long until a process is created, and a later
    controller may have ended the deployment by then: each is created right after `confirm` returned.

    A process that already runs under the name was launched by an earlier controller. If it is adopted, the handle's `start`
    returns what it returned then, or waits for it, and changes nothing in the process.
    """

    def launch_node(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        confirm: Confirm,
        beside: Sequence[Host] = (),
    ) -> NodeHandle:
        """`slot` is the role whose place on the host the node takes; it differs from the node's role if that was changed after
        the node was placed. `needs` is what it takes besides, such as {"GPU": 1}. `beside` lists the other machines of its
        ranks in order; the node takes the same on each."""

    def launch_router(
        self, name: str, config: RouterConfig, host: Host | None, confirm: Confirm, door: str = ""
    ) -> RouterHandle:
        """`host` None places the router on the head. `door` is where the router that it replaces hands over its listening
        socket."""

    async def end(self, name: str) -> None:
        """Ends the process with this name, if there is one, also on a machine that cannot be seen."""


async def as_it_is(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
    """The `FixModel` for models that are files of this machine."""
    return config, ""


class Host(msgspec.Struct, frozen=True):
    """One machine. It gets a new name whenever the machine or its Ray restarts."""

    name: str  # by which a launcher finds it
    address: str  # where routers and other nodes reach its processes
    cores: tuple[int, ...] = ()  # on which nodes may compute, no more than its quota; empty: unknown
    gpus: int = 0
    # How many nodes of each role it has room for; a role that is missing has none. None: no limit.
    slots: dict[Role, int] | None = None
    head: bool = False  # where the controller's router runs
    # The roles that a new node could have on this machine if it were empty. None: any.
    fits: frozenset[Role] | None = None
    # Machines of one name are near each other, such as in one zone or rack; "": not known. KV is handed over within one where that can be.
    island: str = ""

    def could_have(self, role: Role) -> bool:
        return self.fits is None or role in self.fits


class Offer(msgspec.Struct, frozen=True):
    """What a machine offers, as Ray reports it; or what one node takes of a machine, then `labels` is a selector."""

    resources: dict[str, float]
    labels: dict[str, str] = {}


Needs = Mapping[Role, Offer]
"""What one node of each role takes besides one unit of the role's own resource, such as {"GPU": 1}."""


class TakenPlace(msgspec.Struct, frozen=True):
    """The place of a node that exists. Its pool's needs may have changed since the node was placed."""

    host: str  # the machine's name
    slot: Role
    needed: Offer  # includes the role's own resource


class Hosts(Protocol):
    async def present(self) -> list[Host]:
        """Returns the machines that can be seen now, in an order that stays the same while they stay. A missing machine is no
        proof that its processes have ended."""

    async def changed(self, timeout_s: float) -> None:
        """Returns when machines may have come or gone, or after `timeout_s`."""

    def placing(self) -> AbstractAsyncContextManager[None]:
        """While it is entered, no other deployment places nodes on these machines."""

    def use(self, needs: Needs, taken: Sequence[TakenPlace]) -> None:
        """Sets, from the next look on, what new nodes need and the places of all existing nodes."""

    async def want(self, slots: dict[Role, int]) -> None:
        """Tells an autoscaler how many places of each role the deployment needs in all, so that it can add and remove machines.
        Replaces the previous number; only the controller calls this, and it repeats it. Does nothing without an autoscaler."""


CheckKept = Callable[[bytes | None], None]
"""Is given what is kept, and raises if it must not be overwritten."""


class StateStore(Protocol):
    """Keeps what the controller must know after it was killed. Outlives the controller's process."""

    async def load(self) -> bytes | None: ...

    async def save(self, state: bytes, check: CheckKept | None = None) -> None:
        """Calls `check` right before it writes."""
