"""The controller of a deployment: keeps each pool at the size that was ordered, on the machines that exist.

Plain asyncio without Ray: `Hosts` provides the machines, the launcher runs processes on them. Everything that the next controller must
know is recorded before it is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, TandemError, Unavailable
from tandem.base.logs import ClusterLogs, LogsQuery
from tandem.base.tasks import Tasks
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView
from tandem.cluster.describe import counted
from tandem.cluster.events import Events
from tandem.cluster.launcher import FixModel, Hosts, Launcher, StateStore, as_it_is
from tandem.cluster.pools import plan
from tandem.cluster.pools.changes import ConfigDifference, applied, difference
from tandem.cluster.pools.limits import (
    check_alike,
    check_engine_lets_go,
    check_limits,
    check_room,
    check_writers,
)
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.placement import node_config
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.state import NodeRecord
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.pools.turn import Turn, TurnClock
from tandem.cluster.pools.view import CONTROLLER, cluster_view, collected_logs
from tandem.cluster.pools.wings import Joints, join_wings
from tandem.cluster.tasks import Clock, first_of, has_ended
from tandem.wire.nodes import NodeInfo, Role

logger = logging.getLogger(__name__)


_POOLS = tuple(role.value for role in Role)
_WORTH_SAYING_S = 1.0  # a longer wait is reported


class Controller:
    """Implements `cluster.orders.Control`. Must be constructed inside a running event loop. Its owner calls `start`, waits for `failed`
    while it serves, calls `drain` if there is time, and then `stop`."""

    def __init__(
        self,
        config: TandemConfig,
        hosts: Hosts,
        launcher: Launcher,
        store: StateStore,
        events: Events,
        clock: Clock | None = None,
        fix_model: FixModel = as_it_is,
    ) -> None:
        self._events = events
        self._turn = Turn(store)
        self._clock = TurnClock(clock or Clock(), self._turn)
        self._tasks = Tasks()
        self._has_begun = False
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._pools = Reconciler(
            config, hosts, launcher, self._turn, events, self._clock, self._tasks, fix_model
        )
        self._fleet = self._pools.fleet
        self._joints = Joints(self._pools, self._clock, self._tasks, self._resize)
        join_wings(self._joints)
        self._pools.on_config = self._joints.configured
        self._pools.roll_out = self._joints.roll_out
        self.adapters = self._joints.adapters

    @property
    def _config(self) -> TandemConfig:
        return self._pools.config

    @property
    def members(self) -> list[NodeInfo]:
        """The nodes that routers may use."""
        return self._fleet.membership.members

    @property
    def url(self) -> str:
        router = self._fleet.head_router
        return router.url if router is not None else ""

    # --- starting and ending

    async def start(self) -> None:
        """Starts all nodes and routers at once, or adopts those of an earlier controller. Returns when each one that has a machine is
        ready or left out and together they can answer requests. Raises Unavailable when they cannot."""
        self._tasks.spawn(self._turn.over(), "its turn")
        await self._begin()
        await self._unless_it_fails(self._until_answering())

    async def _begin(self) -> None:
        await self._pools.take_over()
        self._has_begun = True
        self._tasks.spawn(self._pools.run(), "reconcile")
        self._begin_wings()

    def _begin_wings(self) -> None:
        for begin in self._joints.begin:
            begin()

    def _remeasure(self) -> None:
        for changed in self._joints.changed:
            changed()

    async def recovered(self) -> None:
        """Call this after `start` has raised. Returns when nodes and routers can answer requests: machines may still come, and an operator
        may start again what was left out."""
        await self._unless_it_fails(self._until_begun())
        await self._unless_it_fails(self._until_ready())

    async def _until_begun(self) -> None:
        """Tries to take over until it succeeds: the record could not be written, or the model's hub did not answer."""
        while not self._has_begun:
            await self._clock.sleep(self._config.timeouts.heartbeat_s)
            with contextlib.suppress(TandemError):
                await self._begin()

    async def _unless_it_fails(self, work: Coroutine[Any, Any, None]) -> None:
        done, failed = await first_of(work, self._tasks.failed())
        if has_ended(failed):
            raise InternalError(failed.result())
        done.result()

    async def failed(self) -> str:
        """Returns the reason when one of the controller's own tasks has died, so that it can no longer do its work."""
        return await self._tasks.failed()

    async def drain(self) -> bool:
        return await self._fleet.drain(self._config.timeouts.nodes.drain_s)

    async def stop(self) -> None:
        """Ends every process. Requests that are still running are lost. Idempotent."""
        await self._tasks.stop()
        await self._fleet.stop()

    async def _until_answering(self) -> None:
        """Waits for starting processes, which have limits of their own, and up to `timeouts.machines_s` for machines, which may never come."""
        waiting_since = self._clock.now()
        while not self._is_answering():
            if any(not part.has_settled for part in self._fleet.parts):
                await self._pools.changed.wait()
                waiting_since = self._clock.now()
            else:
                await self._clock.within(
                    waiting_since + self._config.timeouts.machines_s - self._clock.now(),
                    self._pools.changed.wait(),
                    "waiting for machines with room for the first nodes (timeouts.machines_s)",
                )

    async def until_in_view(self, limit_s: float) -> None:
        """Returns when every serving router uses every serving node. After `limit_s` it reports the nodes that a router does not hear, and
        returns: the rest serves."""
        fleet, began = self._fleet, self._clock.now()
        revision, waited_for = fleet.membership.revision, set[str]()
        while missing := fleet.out_of_view(revision):
            waited = self._clock.now() - began
            for router, nodes in missing.items():
                why = "; ".join(f"{name}: {reason}" for name, reason in sorted(nodes.items()))
                if waited >= limit_s:
                    self._events.trouble(router, f"sends no requests to {why}")
                elif waited >= _WORTH_SAYING_S:
                    waited_for.add(router)
                    heard = 1 - len(nodes) / len(fleet.nodes)
                    self._events.progress(router, f"waiting for word of {why}", heard)
            if waited >= limit_s:
                return
            pause = (limit_s if waited >= _WORTH_SAYING_S else min(limit_s, _WORTH_SAYING_S)) - waited
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(pause, self._pools.changed.wait(), "a router that hears its nodes")
        for name in sorted(waited_for):
            self._events.ready(name, "sends requests to every node that serves")

    async def _until_ready(self) -> None:
        while not (
            self._router_is_ready() and any(node.phase is ProcessPhase.READY for node in self._writers())
        ):
            await self._pools.changed.wait()

    def _router_is_ready(self) -> bool:
        router = self._fleet.head_router
        return router is not None and router.phase is ProcessPhase.READY

    def _writers(self) -> list[NodeSupervisor]:
        return [node for node in self._fleet.nodes.values() if node.config.role.writes_answers]

    def _is_answering(self) -> bool:
        """Returns whether requests can be answered; False while that may still come. Raises Unavailable as soon as it cannot, whatever else
        is still starting."""
        router = self._fleet.head_router
        if router is not None and router.phase is ProcessPhase.LEFT_OUT:
            raise Unavailable(f"the router cannot start: {router.detail}")
        if not self._pools.has_looked:
            return False
        writers = self._writers()
        if writers and all(node.phase is ProcessPhase.LEFT_OUT for node in writers):
            if self._pools.state.rollout is not None:
                return False  # the rollout will be taken back
            reasons = "; ".join(sorted({f"{node.name}: {node.detail}" for node in writers}))
            raise Unavailable(f"no node that can decode has started: {reasons}")
        if not all(part.has_settled for part in self._fleet.parts):
            return False
        if not writers:
            self._events.progress("machines", "waiting for one with room for a node that decodes", 0.0)
        return bool(writers)

    # --- cluster.orders.Control

    async def view(self) -> ClusterView:
        return cluster_view(
            self._config,
            self._fleet.config,
            self._pools.state,
            self._pools.facts(),
            list(self._pools.decisions),
            self._tasks.failure,
            self._pools.rollout_waits,
        )

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        async with self._pools.writing():
            for role, size in wanted.items():
                check_limits(self._config, role, size)
            lines = [self._describe_scaling(role, size) for role, size in wanted.items()]
            await self._resize(wanted)
        lines += [
            f"{name} was left out and is tried again"
            for name in self._left_out(wanted)
            if self._fleet.retry(name)
        ]
        for line in lines:
            self._pools.note(line)
        return lines

    def _left_out(self, wanted: dict[Role, int]) -> list[str]:
        """Returns the routers and nodes to start again if they were left out. A pool that shrinks loses its left-out nodes instead."""
        names = list(self._fleet.routers)
        for role, size in wanted.items():
            staying = self._pools.state.staying(role)
            if size + plan.surge(self._config, self._pools.state, role) >= len(staying):
                names += [record.node_id for record in staying]
        return names

    async def _resize(self, wanted: Mapping[Role, int]) -> None:
        """Requires `writing`."""
        new = self._pools.state.with_sizes(wanted)
        check_writers(new)
        check_room(self._config.pools, self._pools.state, new, self._pools.machines)
        await self._pools.keep(new)
        self._remeasure()
        self._pools.wake()

    def _describe_scaling(self, role: Role, size: int) -> str:
        current = len(self._pools.state.staying(role))
        if size > current:
            return f"{role.value}: from {current} to {size}, {counted(size - current, 'node')} more"
        if size < current:
            return f"{role.value}: from {current} to {size}, {counted(current - size, 'node')} drained"
        return f"{role.value}: stays at {size}"

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        async with self._pools.writing():
            record = self._pools.state.known(node_id)
            if not record.leaving:
                self._check_may_go(record)
                await self._pools.keep(self._pools.state.releasing(record))
                self._pools.note(f"{node_id} is drained, as asked")
                self._pools.departures.begin(node_id, timeout_s)
            task = self._pools.departures.nodes[node_id]
        self._pools.wake()
        return await asyncio.shield(task)

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        deadline = self._clock.now() + timeout_s
        async with self._pools.writing():
            hosts = [host for host in self._pools.machines if host.address == address]
            if not hosts:
                there = ", ".join(host.address for host in self._pools.machines) or "none"
                raise ConfigurationError(f"there is no machine {address}; there are: {there}")
            names = {host.name for host in hosts}
            new = self._pools.state.evacuating(names, [host.name for host in self._pools.machines])
            await self._pools.keep(new)
            going = [
                n for n in new.nodes if n.placement is not None and not names.isdisjoint(n.placement.hosts)
            ]
            self._pools.note(f"{address} is evacuated, as asked: {counted(len(going), 'node')}")
            for node in going:
                if node.node_id not in self._pools.departures.nodes:
                    self._pools.departures.begin(
                        node.node_id,
                        timeout_s,
                        functools.partial(self._until_others_write, node, timeout_s / 2),
                    )
            retiring = {node.node_id: self._pools.departures.nodes[node.node_id] for node in going}
            routers = [r for r in self._fleet.routers.values() if r.runs_on(hosts)]
        self._pools.wake()
        finished = await asyncio.gather(*map(asyncio.shield, retiring.values()))
        # Routers come last, because streams of these nodes may go through them.
        left_s = max(0.0, deadline - self._clock.now())
        await asyncio.gather(*(router.drain(left_s) for router in routers))
        return dict(zip(retiring, finished, strict=True))

    async def configuration(self) -> TandemConfig:
        await self._pools.has_read.wait()  # what is applied may be another one than this process was given
        return self._config

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        async with self._pools.writing():
            running, before = self._config, self._pools.state
            wanted = applied(running, config)
            found = difference(running, config)
            change = self._describe_change(found)
            if dry_run or not (found.sizes or found.at_once or found.nodes or found.routers):
                return change
            if before.rollout is not None:
                raise Unavailable(
                    "a rollout is running: wait for its end (`tandem status`), or take it back with `tandem apply --back`"
                )
            for role, size in found.sizes.items():
                check_limits(wanted, role, size)
            sized = before.with_sizes(found.sizes)
            check_writers(sized)
            check_room(running.pools, before, sized, self._pools.machines)
            await self._pools.apply(wanted, found.sizes, nodes=bool(found.nodes), routers=bool(found.routers))
            self._begin_wings()
            for line in change.at_once:
                self._pools.note(f"applied: {line}")
            return msgspec.structs.replace(change, revision=self._pools.state.revision.number)

    def _describe_change(self, found: ConfigDifference) -> AppliedChange:
        sizes = [
            f"{role.value}: a node for each place" if size is None else self._describe_scaling(role, size)
            for role, size in found.sizes.items()
        ]
        going = [node.node_id for node in self._pools.state.nodes if not node.leaving] if found.nodes else []
        if found.routers:
            going += [router.name for router in self._pools.state.staying_routers]
        number = self._pools.state.revision.number
        return AppliedChange(
            [*sizes, *found.at_once],
            found.nodes,
            found.refused,
            going,
            number,
            found.routers,
            found.controller,
        )

    async def go_back(self) -> None:
        async with self._pools.writing():
            rollout = self._pools.state.rollout
            if rollout is None:
                raise ConfigurationError("no rollout is running: there is nothing to take back")
            if not rollout.going_back:
                await self._pools.go_back("as asked")

    async def pause(self, names: list[str]) -> list[str]:
        async with self._pools.writing():
            self._check_names(names)
            return await self._keep_paused({*self._pools.state.paused, *(names or _POOLS)})

    async def resume(self, names: list[str]) -> list[str]:
        async with self._pools.writing():
            paused = set(self._pools.state.paused)
            if names:
                self._check_names(names)
            for name in names:
                record = self._pools.state.find(name)
                if record is not None and record.role.value in paused - {*names}:
                    raise ConfigurationError(f"{name} is paused with its pool: resume {record.role.value}")
            return await self._keep_paused(paused - {*names} if names else set())

    async def _keep_paused(self, names: set[str]) -> list[str]:
        """Requires `writing`. What wings measured does not count: requests that waited during a pause were no load."""
        paused = sorted(names)
        if paused != self._pools.state.paused:
            await self._pools.keep(msgspec.structs.replace(self._pools.state, paused=paused))
            self._remeasure()
            self._pools.note(
                f"paused, as asked: {', '.join(paused)}" if paused else "nothing is paused any more"
            )
        return paused

    async def reset_cache(self, names: list[str]) -> list[str]:
        async with self._pools.writing():  # before that the nodes are not known
            self._check_names(names)
        chosen = [
            node
            for node in self._fleet.nodes.values()
            # A node that an earlier controller announced serves, even if this one has not reached it yet.
            if (node.serves or node.info is not None)
            and (not names or node.name in names or node.config.role.value in names)
        ]
        answers = await asyncio.gather(*(node.reset_cache() for node in chosen))
        done = sorted(node.name for node, reset in zip(chosen, answers, strict=True) if reset)
        await asyncio.gather(*(router.forget_prefixes(done) for router in self._fleet.routers.values()))
        self._pools.note(f"the prefix cache was emptied, as asked: {', '.join(done) or 'of no node'}")
        if silent := sorted({node.name for node in chosen} - {*done}):
            raise Unavailable(
                f"{', '.join(silent)} did not confirm that the prefix cache is empty: try again"
            )
        return done

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        others = {CONTROLLER, *self._fleet.routers}
        for node in self._fleet.nodes.values():
            others.update(node.log_sources())
        self._check_names([name for name in query.names if name not in others])
        return await collected_logs(self._fleet, query, self._clock)

    def _check_names(self, names: list[str]) -> None:
        for name in names:
            if name not in _POOLS:
                self._pools.state.known(name)

    async def _until_others_write(self, node: NodeRecord, limit_s: float) -> None:
        """Waits until another node can decode, so that the last one serves until its replacement has started; at most `limit_s`."""

        async def another() -> None:
            while not any(
                other.name != node.node_id and other.phase is ProcessPhase.READY for other in self._writers()
            ):
                await self._pools.changed.wait()

        if node.role.writes_answers:
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(limit_s, another(), "starting another node that decodes")

    async def change_role(self, node_id: str, role: Role) -> None:
        async with self._pools.writing():
            record = self._pools.state.known(node_id)
            if record.role is not role and self._pools.state.rollout is not None:
                raise Unavailable(
                    "a rollout is replacing nodes: change the role when it is over (`tandem status`)"
                )
            if record.role is not role:
                await self._keep_role(record, role)
                self._begin_to_change(record, role)
            elif self._fleet.retry(node_id):
                self._pools.note(f"{node_id} was left out and is tried again")
            task, node = self._changing.get(node_id), self._fleet.nodes.get(node_id)
        self._pools.wake()
        if task is not None:
            await asyncio.shield(task)
        elif node is not None:
            await node.settled()
            if node.phase is ProcessPhase.LEFT_OUT:
                raise Unavailable(f"{node_id} did not start: {node.detail}")

    async def _keep_role(self, record: NodeRecord, role: Role) -> None:
        supervisor = self._fleet.nodes.get(record.node_id)
        if record.leaving or supervisor is None or supervisor.phase is not ProcessPhase.READY:
            phase = "waiting for a machine" if supervisor is None else supervisor.phase.value
            raise Unavailable(f"{record.node_id} is {phase}: only a ready node can change its role")
        self._check_may_go(record)
        check_limits(self._config, role, self._wanted(role) + 1)
        check_engine_lets_go(self._config, record.role, role)
        check_alike(self._config.pools, record.role, role)
        new = self._pools.state.with_node(msgspec.structs.replace(record, role=role))
        await self._pools.keep(new.resized(record.role, -1).resized(role, +1))

    def _begin_to_change(self, record: NodeRecord, role: Role) -> None:
        placement = record.placement
        if placement is None:
            raise InternalError(f"{record.node_id} is ready without a place")
        self._pools.note(f"{record.node_id} becomes a {role.value} node, as asked")
        supervisor = self._fleet.nodes[record.node_id]
        config = node_config(self._fleet.config, record.node_id, role, placement)
        task = self._tasks.spawn(
            supervisor.change_role(config, self._config.timeouts.nodes.drain_s),
            f"change the role of {record.node_id}",
            asked=True,
        )
        self._changing[record.node_id] = task
        task.add_done_callback(lambda _: self._changing.pop(record.node_id, None))

    # --- checks of orders

    def _wanted(self, role: Role) -> int:
        return plan.wanted_size(self._pools.state, self._pools.machines, role, self._config.pools)

    def _check_may_go(self, record: NodeRecord) -> None:
        """Raises ConfigurationError if the pool, or the deployment, cannot do without this node."""
        role = record.role
        check_limits(self._config, role, self._wanted(role) - 1)
        if not role.writes_answers:
            return
        if not any(
            node.name != record.node_id and node.phase is ProcessPhase.READY for node in self._writers()
        ):
            raise ConfigurationError(
                f"{record.node_id} is the last node that can decode: run `tandem scale {role.value}="
                f"{self._wanted(role) + 1}` first"
            )
        # A rollout takes the others away.
        check_writers(self._pools.state.resized(role, -1))
