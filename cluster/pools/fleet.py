"""All supervisors of nodes and routers, and the tasks in which they run. The reconciler decides what there should be."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from tandem.base.tasks import Tasks
from tandem.cluster.config import TandemConfig
from tandem.cluster.events import Events
from tandem.cluster.launcher import Host, Launcher
from tandem.cluster.pools.node_supervisor import Admit, KeepLeftOut, NodeSupervisor, WantedAdapters
from tandem.cluster.pools.placement import node_config, router_config
from tandem.cluster.pools.router_supervisor import AdmitRouter, RouterSupervisor
from tandem.cluster.pools.state import ClusterState, Membership, NodePlacement, NodeRecord, RouterRecord
from tandem.cluster.pools.supervisor import ProcessPhase, SupervisorContext
from tandem.cluster.pools.witnesses import Witnesses
from tandem.cluster.tasks import Clock, Wakeup, cancel
from tandem.router.config import RouterConfig, RouterPlacement
from tandem.wire.nodes import PoolReport
from tandem.wire.requests import NodeStatus

_ROUTER = "router"


class Fleet:
    def __init__(
        self,
        config: TandemConfig,
        launcher: Launcher,
        events: Events,
        clock: Clock,
        tasks: Tasks,
        changed: Wakeup,
        admit: Admit,
        keep_left_out: KeepLeftOut,
        admit_router: AdmitRouter,
        adapters: WantedAdapters,
        confirm: Callable[[], Awaitable[object]],
    ) -> None:
        # `Reconciler` replaces the model's name in it by one commit before anything is launched.
        self.config = config
        self._configs: dict[int, TandemConfig] = {}  # that nodes start with, by revision
        self._clock = clock
        self._tasks = tasks
        self._changed = changed
        self._admit = admit
        self._keep_left_out = keep_left_out
        # By machines that this controller has not seen yet: set when it sees them
        self._unseen: dict[str, asyncio.Event] = {}
        self._admit_router = admit_router
        self._adapters = adapters
        # Called when a router begins to serve, and when a router's process got SIGTERM.
        self.wake: Callable[[], None] = lambda: None
        self.pool_reports: Callable[[], Sequence[PoolReport]] = tuple  # what routers show of their pools
        self.membership = Membership()
        self.nodes: dict[str, NodeSupervisor] = {}
        self.routers: dict[str, RouterSupervisor] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        timeouts = config.timeouts
        witnesses = Witnesses(
            lambda: [node.handle for node in self.nodes.values() if node.handle and node.serves],
            lambda: [router.handle for router in self.routers.values() if router.handle and router.serves],
            clock,
            timeouts.silence_s,
        )
        self._context = SupervisorContext(
            launcher,
            self.membership,
            witnesses,
            timeouts,
            events,
            clock,
            changed.ring,
            lambda: self.pool_reports(),
            confirm,
        )
        self._ending: set[NodeSupervisor | RouterSupervisor] = set()

    @property
    def parts(self) -> list[RouterSupervisor | NodeSupervisor]:
        return [*self.routers.values(), *self.nodes.values()]

    def statuses(self) -> list[NodeStatus]:
        """Returns what the serving nodes last reported."""
        return [
            node.status
            for node in self.nodes.values()
            if node.phase is ProcessPhase.READY and node.status is not None
        ]

    def longest_wait_s(self) -> float:
        """Returns how long the oldest request has waited in a router for room on a node."""
        return max((router.load.oldest_wait_s for router in self.routers.values()), default=0.0)

    def use(self, config: TandemConfig, configs: Mapping[int, TandemConfig]) -> None:
        """Sets the configuration for everything that starts from now on. `configs` are the nodes' by revision."""
        self.config, self._configs = config, dict(configs)
        self._context.timeouts = config.timeouts
        for router in self.routers.values():
            router.config = self._with_tokenizer(router.config)

    def config_of(self, revision: int) -> TandemConfig:
        """Returns the configuration with which nodes of this revision start."""
        return self._configs.get(revision, self.config)

    # --- nodes

    def launch_node(
        self, record: NodeRecord, placement: NodePlacement, host: Host, *, is_seen: bool = True
    ) -> None:
        config = self.config_of(record.revision)
        supervisor = NodeSupervisor(
            node_config(config, record.node_id, record.role, placement),
            host,
            placement.slot,
            config.pools.of(placement.slot).resources_per_machine,
            self._context,
            self._admit,
            self._keep_left_out,
            self._adapters,
            record.info,
            None if is_seen else self._unseen.setdefault(host.name, asyncio.Event()),
            beside=[Host(there.host, there.address, slots={}) for there in placement.others],
        )
        self.nodes[record.node_id] = supervisor
        if record.left_out:
            supervisor.stay_left_out(record.left_out)
        else:
            self._run(supervisor)

    def machines_are_seen(self, hosts: Iterable[Host]) -> None:
        for host in hosts:
            if (seen := self._unseen.pop(host.name, None)) is not None:
                for node in self._nodes_on(host):
                    if node.host.name == host.name:
                        node.host = host
                seen.set()

    def _run(self, supervisor: NodeSupervisor | RouterSupervisor) -> None:
        self._runs[supervisor.name] = self._tasks.spawn(supervisor.run(), f"supervise {supervisor.name}")

    async def may_serve_on(self, host: Host) -> bool:
        """Returns whether a node or router on this machine, which cannot be seen, may be serving: the processes that work with it
        have heard it within the routers' own limit for silence, or none of them can be asked."""
        witnesses, limit_s = self._context.witnesses, self.config.router.heartbeat.silence
        for node in self._nodes_on(host):
            if node.info is not None:  # it is announced
                seen = await witnesses.of_node(node.info)
                if seen is None or seen.silent_s < limit_s:
                    return True
        for router in self.routers.values():
            is_there = router.host is not None and router.host.name == host.name
            if is_there and router.serves and router.handle is not None and router.info is not None:
                alone = not self._beside(router)
                if await witnesses.of_router(router.handle, router.info, is_alone=alone) is not False:
                    return True
        return False

    def without_room(self, host: Host) -> Host:
        """Returns the host with places for the nodes that run there, and no others."""
        taken = Counter(node.slot for node in self._nodes_on(host))
        return msgspec.structs.replace(host, slots=dict(taken))

    def _nodes_on(self, host: Host) -> list[NodeSupervisor]:
        return [node for node in self.nodes.values() if host.name in node.machines]

    def retry(self, name: str) -> bool:
        """Starts the process again if it was left out. Returns whether it was."""
        supervisor = self.nodes.get(name) or self.routers.get(name)
        if supervisor is None or supervisor.phase is not ProcessPhase.LEFT_OUT:
            return False
        self._run(supervisor)
        return True

    async def end_node(self, node_id: str) -> None:
        """Withdraws the node from the routers, then ends it. Idempotent. A node that an earlier controller started on a machine which
        was not seen since is ended, too: it would keep its place there when the machine returns."""
        supervisor = self.nodes.pop(node_id, None)
        if supervisor is None:
            await self._context.launcher.end(node_id)
        await self._end(supervisor)

    async def _end(self, supervisor: NodeSupervisor | RouterSupervisor | None) -> None:
        if supervisor is None:
            return
        self._ending.add(supervisor)
        if (run := self._runs.get(supervisor.name)) is not None:
            await cancel(run)
        await supervisor.stop()
        self._runs.pop(supervisor.name, None)
        self._ending.discard(supervisor)
        self._changed.ring()

    # --- routers

    def router_places(self, hosts: Sequence[Host]) -> Mapping[str, Host | None]:
        """Returns the machines that should have routers: the head (None), and with `router.placement: every_host` every other
        machine."""
        places: dict[str, Host | None] = {"": None}
        if self.config.router.placement is RouterPlacement.EVERY_HOST:
            heads = {host.address for host in hosts if host.head}
            for host in hosts:
                if host.address not in heads:  # the head's router has the port there
                    places.setdefault(host.address, host)
        return places

    def new_router(
        self, place: str, host: Host | None, known: Collection[RouterRecord]
    ) -> RouterRecord | None:
        """Returns a record for a new router in this place. None: it must wait, because its machine has not been seen yet or an earlier
        router of the place is still ending."""
        if self.is_unseen(host):
            return None
        if any(router.place == place for router in self._ending if isinstance(router, RouterSupervisor)):
            return None
        name = f"{_ROUTER}-{place}" if place else _ROUTER
        taken = {record.name for record in known} | self._runs.keys()
        number = next(n for n in itertools.count(1) if _numbered(name, n) not in taken)
        return RouterRecord(_numbered(name, number), place, self.router_config(place))

    def planned_routers(
        self, state: ClusterState, places: Mapping[str, Host | None], hosts: Collection[str]
    ) -> tuple[ClusterState, dict[str, tuple[str, bool]]]:
        """Returns the state with `router.processes` routers in each of the places, and the routers that must drain and end: for each
        the reason, and whether another one takes its place. Routers of machines outside `hosts` are removed with their machine."""
        new, wanted = state, self.config.router.processes
        going: dict[str, tuple[str, bool]] = {}

        def leave(record: RouterRecord, why: str, *, is_replaced: bool = True) -> None:
            nonlocal new
            new = new.with_router(msgspec.structs.replace(record, leaving=True))
            going[record.name] = (why, is_replaced)

        for record in state.routers:
            router = self.routers.get(record.name)
            if record.place not in hosts:
                new = new.without_router(record.name)
            elif record.leaving:
                continue
            elif record.place not in places:
                why = "drains and ends: router.placement has no router on its machine"
                leave(record, why, is_replaced=False)
            elif router is not None and router.load.is_ending:
                leave(record, "got SIGTERM: another router takes its place")
        for place, host in places.items():
            there = [record for record in new.staying_routers if record.place == place]
            # The second and later ones get the listening socket from one that serves.
            may_listen = not there or any(self.serves(record.name) for record in there)
            if may_listen and len(there) < wanted and (made := self.new_router(place, host, new.routers)):
                new = new.with_router(made)
            if new.rollout is None:
                # A rollout removes the surplus that it makes itself. The last ones go: the first have the plain names.
                for record in there[wanted:]:
                    leave(record, f"drains and ends: router.processes is {wanted}")
        for record in new.staying_routers:
            if record.name not in self.routers and new.rollout is None:
                # An earlier controller started it, maybe with another configuration.
                config = self.router_config(record.place)
                new = new.with_router(msgspec.structs.replace(record, config=config))
        return new, going

    def out_of_view(self, revision: int) -> dict[str, dict[str, str]]:
        """Returns, for each router that does not use every serving node, which nodes it does not use and why. `revision` is the
        membership's that every router must have."""
        ready = [node.name for node in self.nodes.values() if node.phase is ProcessPhase.READY]
        missing: dict[str, dict[str, str]] = {}
        for router in self.routers.values():
            if router.phase is not ProcessPhase.READY:
                continue
            if router.told < revision:
                missing[router.name] = dict.fromkeys(ready, "the router has not received it yet")
            elif unseen := {name: why for name in ready if (why := router.load.out_of_view.get(name))}:
                missing[router.name] = unseen
        return missing

    def serves(self, name: str) -> bool:
        router = self.routers.get(name)
        return router is not None and router.serves

    def is_unseen(self, host: Host | None) -> bool:
        """Returns whether an earlier controller knew this machine and this one has not seen it. Nothing can be started there."""
        return host is not None and host.name in self._unseen

    def launch_router(self, record: RouterRecord, host: Host | None) -> None:
        record = msgspec.structs.replace(record, config=self._with_tokenizer(record.config))
        router = RouterSupervisor(
            record, host, self._context, self._admit_router, lambda: self._beside(router), self.wake
        )
        self.routers[record.name] = router
        self._run(router)

    def _beside(self, router: RouterSupervisor) -> list[RouterSupervisor]:
        return [
            other for other in self.routers.values() if other is not router and other.place == router.place
        ]

    def is_outdated(self, record: RouterRecord) -> bool:
        """Returns whether a new router in its place would start with another configuration."""
        return _as_it_serves(record.config) != _as_it_serves(self.router_config(record.place))

    def router_config(self, place: str) -> RouterConfig:
        return router_config(self.config.router, place) if place else self.config.router

    def _with_tokenizer(self, config: RouterConfig) -> RouterConfig:
        """The tokenizer's folder may have moved since the router's last start."""
        return msgspec.structs.replace(config, tokenizer_path=self.config.router.tokenizer_path)

    @property
    def head_router(self) -> RouterSupervisor | None:
        """The router on the head: one that serves, if any does; during a rollout a new one before an old one."""
        there = [router for router in self.routers.values() if not router.place]
        order = [ProcessPhase.READY, ProcessPhase.DRAINING, ProcessPhase.STARTING, ProcessPhase.RESTARTING]
        return min(
            there,
            key=lambda router: (
                order.index(router.phase) if router.phase in order else len(order),
                _as_it_serves(router.config) != _as_it_serves(self.config.router),
            ),
            default=None,
        )

    async def end_router(self, name: str) -> None:
        """Idempotent."""
        await self._end(self.routers.pop(name, None))

    # --- all of it

    async def drain(self, limit_s: float) -> bool:
        """Routers and nodes refuse new requests and finish the ones that they have. Returns True when all of that, transfers included,
        ended in time. Nodes that die during it are replaced as usual."""
        deadline = self._clock.now() + limit_s
        quiet = await asyncio.gather(*(router.drain(limit_s) for router in self.routers.values()))
        left = max(0.0, deadline - self._clock.now())
        ready = [node for node in self.nodes.values() if node.phase is ProcessPhase.READY]
        return all([*quiet, *await asyncio.gather(*(node.drain(left) for node in ready))])

    async def stop(self) -> None:
        """Ends every process. Call it after `tasks` has been stopped. Idempotent."""
        self._runs.clear()
        await asyncio.gather(*(part.stop() for part in [*self.parts, *self._ending]))


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}~{number}"


def _as_it_serves(config: RouterConfig) -> RouterConfig:
    """Returns the configuration without what a running router can change: its tokenizer's folder, the number and placement of routers."""
    return msgspec.structs.replace(config, tokenizer_path="-", processes=1, placement=RouterPlacement.HEAD)
