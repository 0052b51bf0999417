"""All supervisors of nodes and routers, and the tasks in which they run. The reconciler decides what there should be."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.base.errors import DeadlineExceeded
from tandem.base.tasks import Tasks
from tandem.cluster.config import TandemConfig
from tandem.cluster.events import Events
from tandem.cluster.launcher import Host, Launcher
from tandem.cluster.pools.facts import Facts, NodeFacts, RouterFacts
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.placement import node_config
from tandem.cluster.pools.plan import as_it_serves
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import Membership, NodePlacement, NodeRecord, RouterRecord
from tandem.cluster.pools.supervisor import ProcessPhase, StateRecorder, SupervisorContext
from tandem.cluster.pools.witnesses import Witnesses
from tandem.cluster.tasks import Clock, cancel
from tandem.router.config import RouterConfig


class Fleet:
    def __init__(
        self,
        config: TandemConfig,
        recorder: StateRecorder,
        launcher: Launcher,
        events: Events,
        clock: Clock,
        tasks: Tasks,
    ) -> None:
        # `Reconciler` replaces the model's name in it by one commit before anything is launched.
        self.config = config
        self._configs: dict[int, TandemConfig] = {}  # that nodes start with, by revision
        self._clock = clock
        self._tasks = tasks
        # By machines that this controller has not seen yet: set when it sees them
        self.unseen: dict[str, asyncio.Event] = {}
        self.membership = Membership()
        self.nodes: dict[str, NodeSupervisor] = {}
        self.routers: dict[str, RouterSupervisor] = {}
        self.is_draining = False  # all of it, before the cluster's end
        self._runs: dict[str, asyncio.Task[None]] = {}
        timeouts = config.timeouts
        witnesses = Witnesses(
            lambda: [node.handle for node in self.nodes.values() if node.handle and node.serves],
            lambda: [router.handle for router in self.routers.values() if router.handle and router.serves],
            clock,
            timeouts.silence_s,
        )
        self._context = SupervisorContext(recorder, launcher, self.membership, witnesses, timeouts, events, clock)
        self._ending: set[NodeSupervisor | RouterSupervisor] = set()

    @property
    def parts(self) -> list[RouterSupervisor | NodeSupervisor]:
        return [*self.routers.values(), *self.nodes.values()]

    def facts(self, hosts: Sequence[Host]) -> Facts:
        return Facts(
            self._clock.now(),
            hosts,
            frozenset(self.unseen),
            {
                name: NodeFacts(node.phase, node.detail, node.restarts, node.served_s, node.info, node.status)
                for name, node in self.nodes.items()
            },
            {
                name: RouterFacts(
                    router.phase, router.detail, router.restarts, router.served_s, router.info, router.load
                )
                for name, router in self.routers.items()
            },
        )

    def use(self, config: TandemConfig, configs: Mapping[int, TandemConfig]) -> None:
        """Sets the configuration for everything that starts from now on. `configs` are the nodes' by revision."""
        self.config, self._configs = config, dict(configs)
        self._context.timeouts = config.timeouts
        for router in self.routers.values():
            router.config = self._with_tokenizer(router.config)

    def config_of(self, revision: int) -> TandemConfig:
        return self._configs.get(revision, self.config)

    # --- nodes

    def launch_node(self, record: NodeRecord, placement: NodePlacement, host: Host) -> None:
        config = self.config_of(record.revision)
        supervisor = NodeSupervisor(
            node_config(config, record.node_id, record.role, placement),
            host,
            placement.slot,
            config.pools.of(placement.slot).resources_per_machine,
            self._context,
            record.info,
            self.unseen.get(host.name),
            beside=[Host(there.host, there.address, slots={}) for there in placement.others],
        )
        self.nodes[record.node_id] = supervisor
        if record.left_out:
            supervisor.stay_left_out(record.left_out)
        else:
            self._run(supervisor)

    def machines_are_seen(self, hosts: Iterable[Host]) -> None:
        for host in hosts:
            if (seen := self.unseen.pop(host.name, None)) is not None:
                for node in self._nodes_on(host):
                    if node.host.name == host.name:
                        node.host = host
                seen.set()

    def _run(self, supervisor: NodeSupervisor | RouterSupervisor) -> None:
        self._runs[supervisor.name] = self._tasks.spawn(supervisor.run(), f"supervise {supervisor.name}")

    async def may_serve_on(self, host: Host) -> bool:
        """Returns whether a node or router on this machine, which cannot be seen, may be serving: the processes that work with it
        have heard it within the routers' own limit for silence, or none of them can be asked. A node that changes its role is withdrawn
        from them; if its machine is gone, its change fails soon."""
        witnesses, limit_s = self._context.witnesses, self.config.router.heartbeat.silence
        for node in self._nodes_on(host):
            if node.changes_role:
                return True
            if node.info is not None:  # it is announced
                seen = await witnesses.of_node(node.info)
                if seen is None or seen.silent_s < limit_s:
                    return True
        for router in self.routers.values():
            is_there = router.host is not None and router.host.name == host.name
            if is_there and router.serves and router.handle is not None and router.info is not None:
                alone = not self.beside(router)
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
        supervisor.try_again()
        self._run(supervisor)
        return True

    async def end_node(self, node_id: str) -> None:
        """Withdraws the node from the routers, then ends it. Idempotent. A node that an earlier controller started on a machine which
        was not seen since is ended, too: it would keep its place there when the machine returns."""
        await self._end(node_id, self.nodes.pop(node_id, None))

    async def _end(self, name: str, supervisor: NodeSupervisor | RouterSupervisor | None) -> None:
        if supervisor is None:
            await self._context.launcher.end(name)
            return
        self._ending.add(supervisor)
        if (run := self._runs.get(supervisor.name)) is not None:
            await cancel(run)
        await supervisor.stop()
        self._runs.pop(supervisor.name, None)
        self._ending.discard(supervisor)
        self._context.recorder.changed.ring()

    # --- routers

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

    def launch_router(self, record: RouterRecord, host: Host | None) -> None:
        record = msgspec.structs.replace(record, config=self._with_tokenizer(record.config))
        router = RouterSupervisor(record, host, self._context, lambda: self.beside(router))
        self.routers[record.name] = router
        self._run(router)

    def beside(self, router: RouterSupervisor) -> list[RouterSupervisor]:
        return [other for other in self.routers.values() if other is not router and other.place == router.place]

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
                as_it_serves(router.config) != as_it_serves(self.config.router),
            ),
            default=None,
        )

    async def end_router(self, name: str) -> None:
        """Withdraws the router, then ends it. Idempotent."""
        await self._end(name, self.routers.pop(name, None))

    # --- all of it

    async def drain(self, limit_s: float) -> bool:
        """Routers and nodes refuse new requests and finish the ones that they have. Returns True when all of that, transfers included,
        ended in time. Nodes that die during it are replaced as usual. What an earlier controller left is reached first: it may have requests."""
        self.is_draining = True
        deadline = self._clock.now() + limit_s

        def left() -> float:
            return max(0.0, deadline - self._clock.now())

        with contextlib.suppress(DeadlineExceeded):
            await self._clock.within(limit_s, self._until_adopted(), "reaching what an earlier controller left")
        quiet = await asyncio.gather(*(router.drain(left()) for router in self.routers.values()))
        ready = [node for node in self.nodes.values() if node.phase is ProcessPhase.READY]
        reached = not any(node.may_serve for node in self.nodes.values() if not node.serves)
        return all([reached, *quiet, *await asyncio.gather(*(node.drain(left()) for node in ready))])

    async def _until_adopted(self) -> None:
        await asyncio.gather(*(part.settled() for part in self.parts if part.may_serve))

    async def stop(self) -> None:
        """Ends every process. Call it after `tasks` has been stopped. Idempotent."""
        self._runs.clear()
        await asyncio.gather(*(part.stop() for part in [*self.parts, *self._ending]))
