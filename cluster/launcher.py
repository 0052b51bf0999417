"""The machines that nodes and routers can run on, and their processes there, as the controller sees them. `on_ray` is one
answer, the tests' fake another.

A handle is one incarnation of one process: when it has ended it stays ended, and a replacement is a new handle. A
process that runs already under its name, with the same configuration, is adopted as it is: so a controller that was
lost comes back to nodes that never noticed.
Every method raises errors of `wire.errors` only; `stop` raises nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import msgspec

from tandem.cluster.config import TandemConfig
from tandem.node.config import NodeConfig
from tandem.router.config import RouterConfig
from tandem.wire.logs import LogPage, LogPosition
from tandem.wire.nodes import NodeInfo, NodeSighting, Role, RouterInfo, RouterQueue
from tandem.wire.progress import Report
from tandem.wire.requests import NodeStatus

FixModel = Callable[[TandemConfig, str], Awaitable[tuple[TandemConfig, str]]]
"""The configuration with one commit of its model instead of a name that will stand for another one tomorrow, and that
commit: the one that is given, or, for "", the one that the name stands for now. "" for a model without commits."""

Ready = TypeVar("Ready", covariant=True)


class Handle(Protocol[Ready]):
    async def start(self, report: Report) -> Ready:
        """Returns when it can take work. Raises ConfigurationError when trying again would not help."""
        ...

    async def ended(self) -> str:
        """Returns when the process is certainly gone, and says why. Of a node on several machines: when one of its processes is, because
        none of them is of use without the others."""
        ...

    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        """The lines of its log after one that was seen, or the last ones; no more than `most`."""
        ...

    async def stop(self) -> None:
        """Ends the process, politely first, and all that belong to it; returns when they are gone. Idempotent."""
        ...


class NodeHandle(Handle[NodeInfo], Protocol):
    async def admit(self, keys: list[str]) -> None:
        """The public keys of all processes that may speak to it, every time."""
        ...

    async def status(self) -> NodeStatus: ...

    async def routers_heard(self) -> list[str]:
        """The routers that it heard lately, by the endpoints where they listen."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new; True when everything under way has ended in time."""
        ...

    async def reset_cache(self, timeout_s: float) -> bool:
        """No request that comes from now on begins from KV that is cached there now, in any tier. False: not in time."""
        ...

    async def set_adapters(
        self, wanted: Mapping[str, str], timeout_s: float, report: Report
    ) -> dict[str, str]:
        """All adapters that new requests may name: where each is. Answers with their digests, by name. Raises ConfigurationError for one
        that cannot be served there, and nothing has changed then."""
        ...

    async def change_role(self, config: NodeConfig, report: Report) -> NodeInfo:
        """The same process, with the weights that it has loaded, as another node: a new epoch, new addresses. Only
        after a `drain` that was finished; raises Unavailable otherwise."""
        ...


class RouterHandle(Handle[RouterInfo], Protocol):
    async def set_members(
        self, members: list[NodeInfo], paused: Sequence[str], desks: Mapping[str, str]
    ) -> RouterQueue:
        """The nodes that there are, all of them. A node that is missing is gone. No other process may speak to the router. `paused`:
        the pools and nodes that get no new requests, by name. `desks`: the router processes on its port by name, itself too, and
        where they ask each other. Answers with what waits there."""
        ...

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        """These nodes have nothing cached any more."""
        ...

    async def nodes_heard(self) -> list[NodeSighting]:
        """One sighting of every node that it was told of."""
        ...

    async def answers_clients(self) -> bool:
        """Whether it answers at its URL: another way than that of every other question here."""
        ...

    async def drain(self, timeout_s: float) -> bool: ...

    async def leave(self, timeout_s: float) -> bool:
        """Another router has its listening socket: it takes no new connection and finishes what it has; True when all of that ended in
        time."""
        ...


class Launcher(Protocol):
    """Launching only begins: what can fail fails in the handle's `start`.

    A process of this name that runs already was launched by an earlier controller. It is adopted: its handle's `start`
    answers what it answered then, or is about to answer, and disturbs nothing.
    """

    def launch_node(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        beside: Sequence[Host] = (),
    ) -> NodeHandle:
        """`slot` is which of the host's places it takes: its role, unless that was changed since it was placed. `needs`: what it takes
        besides that, such as {"GPU": 1}. `beside`: the other machines of its ranks, in order; it takes the same on each of them."""
        ...

    def launch_router(
        self, name: str, config: RouterConfig, host: Host | None, door: str = ""
    ) -> RouterHandle:
        """None: on the head. `door`: of the router on that machine whose listening socket it is to have."""
        ...


async def as_it_is(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
    """`FixModel` for models that are files of this machine."""
    return config, ""


class Host(msgspec.Struct, frozen=True):
    """One machine. Its name is new whenever the machine (or its Ray) has been restarted."""

    name: str  # what a launcher finds it by
    address: str  # where routers and other nodes reach what runs there
    cores: tuple[int, ...] = ()  # those that nodes may compute on, no more than its quota; empty: unknown
    gpus: int = 0
    # How many nodes of each role it offers room for; a role that is missing: none. None: as many as anyone asks for.
    slots: dict[Role, int] | None = None
    head: bool = False  # where the controller's router runs
    # Roles that a node could have there that is made now, if nothing else ran there. None: any.
    fits: frozenset[Role] | None = None

    def could_have(self, role: Role) -> bool:
        return self.fits is None or role in self.fits


class Offer(msgspec.Struct, frozen=True):
    """What Ray knows of a machine, or what one node takes of one: then the labels are a selector's."""

    resources: dict[str, float]
    labels: dict[str, str] = {}


Needs = Mapping[Role, Offer]
"""What one node of a role takes besides one of the role's own resource, such as {"GPU": 1}."""


class TakenPlace(msgspec.Struct, frozen=True):
    """A node's, which may have been made when its pool needed something else."""

    host: str  # its name
    slot: Role
    needed: Offer  # with the role's own resource


class Hosts(Protocol):
    async def present(self) -> list[Host]:
        """The machines that are there now, in an order that does not change while they stay. One that is missing cannot be
        seen from here: that does not prove that what runs there has ended."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Returns when machines may have come or gone, or after this long."""
        ...

    def placing(self) -> AbstractAsyncContextManager[None]:
        """For as long as it lasts, no other deployment gives places on these machines to its nodes."""
        ...

    def use(self, needs: Needs, taken: Sequence[TakenPlace]) -> None:
        """From the next look on: what nodes need that are made now, and the places of all that there are."""
        ...

    async def want(self, slots: dict[Role, int]) -> None:
        """How much room is needed in all, so that an autoscaler can add and remove machines. Replaces what was said
        before; there is one owner of it: the controller, which says it again and again. Nothing happens where there
        is none."""
        ...


class StateStore(Protocol):
    """Where the controller keeps what it must know after it was killed. Outlives its process."""

    async def load(self) -> bytes | None: ...

    async def save(self, state: bytes) -> None: ...
