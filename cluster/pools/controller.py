"""The controller of a deployment: keeps each pool at the size that was ordered, on the machines that exist.

Plain asyncio without Ray: `Hosts` provides the machines, the launcher runs processes on them. Everything that the next controller must
know is recorded before it is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, TandemError, Unavailable
from tandem.base.logs import ClusterLogs, LogsQuery
from tandem.base.tasks import Tasks
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView, CoresView, Expectation
from tandem.cluster.describe import counted
from tandem.cluster.events import Events
from tandem.cluster.launcher import FixModel, Hosts, Launcher, StateStore, as_it_is
from tandem.cluster.pools import operator_changes, plan
from tandem.cluster.pools.changes import applied, difference
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.pools.turn import Turn, TurnClock
from tandem.cluster.pools.view import CONTROLLER, cluster_view, collected_logs
from tandem.cluster.pools.wings import Foresight, Joints, join_wings
from tandem.cluster.tasks import Clock, first_of, has_ended
from tandem.wire.nodes import NodeInfo, Role

logger = logging.getLogger(__name__)


_LEAST_PAUSE_S = 1e-3  # what rounding leaves of a wait would be no wait
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
        clock = clock or Clock()
        self._turn = Turn(store, clock)
        self._clock = TurnClock(clock, self._turn)
        self._tasks = Tasks()
        self._begun = asyncio.Event()
        self.pools = Reconciler(config, hosts, launcher, self._turn, events, self._clock, self._tasks, fix_model)
        self.fleet = self.pools.fleet
        self._joints = Joints(self.pools, self._clock, self._tasks, self._resize)
        join_wings(self._joints)
        self.pools.on_config = self._joints.configured
        self.pools.roll_out = self._joints.roll_out
        self.adapters = self._joints.adapters

    @property
    def _config(self) -> TandemConfig:
        return self.pools.config

    @property
    def members(self) -> list[NodeInfo]:
        """The nodes that routers may use."""
        return self.fleet.membership.members

    @property
    def url(self) -> str:
        router = self.fleet.head_router
        return router.url if router is not None else ""

    # --- starting and ending

    async def start(self) -> None:
        """Starts all nodes and routers at once, or adopts those of an earlier controller. Returns when each one that has a machine is
        ready or left out and together they can answer requests. Raises Unavailable when they cannot."""
        self._tasks.spawn(self._turn.over(), "its turn")
        await self._begin()
        await self._unless_it_fails(self._until_answering())

    async def _begin(self) -> None:
        await self.pools.take_over()
        self._begun.set()
        self._tasks.spawn(self.pools.run(), "reconcile")
        self._begin_wings()

    def _begin_wings(self) -> None:
        for begin in self._joints.begin:
            begin()

    async def recovered(self) -> None:
        """Call this after `start` has raised. Returns when nodes and routers can answer requests: machines may still come, and an operator
        may start again what was left out."""
        await self._unless_it_fails(self._until_begun())
        await self._unless_it_fails(self._until_ready())

    async def _until_begun(self) -> None:
        """Tries to take over until it succeeds: the record could not be written, or the model's hub did not answer."""
        while not self._begun.is_set():
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
        """See `Fleet.drain`. A controller that has just been started again takes over first."""
        limit_s = self._config.timeouts.nodes.drain_s
        deadline = self._clock.now() + limit_s
        try:
            await self._clock.within(limit_s, self._begun.wait(), "taking over")
        except DeadlineExceeded:
            return False
        return await self.fleet.drain(deadline - self._clock.now())

    async def stop(self) -> None:
        """Ends every process. Requests that are still running are lost. Idempotent."""
        await self._tasks.stop()
        await self.fleet.stop()

    async def _until_answering(self) -> None:
        """Waits for starting processes, which have limits of their own, and up to `timeouts.machines_s` for machines, which may never come."""
        waiting_since = self._clock.now()
        while not self._is_answering():
            if any(not part.has_settled for part in self.fleet.parts):
                await self.pools.changed.wait()
                waiting_since = self._clock.now()
            else:
                await self._clock.within(
                    waiting_since + self._config.timeouts.machines_s - self._clock.now(),
                    self.pools.changed.wait(),
                    "waiting for machines with room for the first nodes (timeouts.machines_s)",
                )

    async def until_in_view(self, limit_s: float) -> None:
        """Returns when every serving router uses every serving node. After `limit_s` it reports the nodes that a router does not hear, and
        returns: the rest serves."""
        fleet, began = self.fleet, self._clock.now()
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
            until = limit_s if waited >= _WORTH_SAYING_S else min(limit_s, _WORTH_SAYING_S)
            pause = max(until - waited, _LEAST_PAUSE_S)
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(pause, self.pools.changed.wait(), "a router that hears its nodes")
        for name in sorted(waited_for):
            self._events.ready(name, "sends requests to every node that serves")

    async def _until_ready(self) -> None:
        while not (self._router_is_ready() and any(node.phase is ProcessPhase.READY for node in self._writers())):
            await self.pools.changed.wait()

    def _router_is_ready(self) -> bool:
        router = self.fleet.head_router
        return router is not None and router.phase is ProcessPhase.READY

    def _writers(self) -> list[NodeSupervisor]:
        return [node for node in self.fleet.nodes.values() if node.config.role.writes_answers]

    def _is_answering(self) -> bool:
        """Returns whether requests can be answered; False while that may still come. Raises Unavailable as soon as it cannot, whatever else
        is still starting."""
        router = self.fleet.head_router
        if router is not None and router.phase is ProcessPhase.LEFT_OUT:
            raise Unavailable(f"the router cannot start: {router.detail}")
        if not self.pools.has_looked:
            return False
        writers = self._writers()
        if writers and all(node.phase is ProcessPhase.LEFT_OUT for node in writers):
            if self.pools.state.rollout is not None:
                return False  # the rollout will be taken back
            reasons = "; ".join(sorted({f"{node.name}: {node.detail}" for node in writers}))
            raise Unavailable(f"no node that can decode has started: {reasons}")
        if not all(part.has_settled for part in self.fleet.parts):
            return False
        if not writers:
            self._events.progress("machines", "waiting for one with room for a node that decodes", 0.0)
        return bool(writers)

    # --- cluster.orders.Control

    async def view(self) -> ClusterView:
        view = cluster_view(
            self._config,
            self.fleet.config,
            self.pools.state,
            self.pools.facts(),
            list(self.pools.decisions),
            self._tasks.failure,
            self.pools.rollout_waits,
        )
        foresight = self._joints.foresight
        return view if foresight is None else msgspec.structs.replace(view, foresight=foresight.view())

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        async with self.pools.writing():
            new, lines = operator_changes.scaled(self._config, self.pools.state, self.pools.facts(), wanted)
            self._foretell_change(new)
            await self._change_load(new)
        lines += [
            f"{name} was left out and is tried again" for name in self._left_out(wanted) if self.fleet.retry(name)
        ]
        for line in lines:
            self.pools.note(line)
        return lines

    async def foretell(self, wanted: dict[Role, int]) -> Expectation:
        return await (await self._foresight()).foretell(wanted)

    async def cores(self, wanted: dict[Role, int]) -> CoresView:
        return (await self._foresight()).cores(wanted)

    async def _foresight(self) -> Foresight:
        await self.pools.has_read.wait()
        if self._joints.foresight is None:
            raise ConfigurationError("this installation foretells nothing")
        return self._joints.foresight

    def _foretell_change(self, new: ClusterState, *, by_load: bool = False) -> None:
        if self._joints.foresight is not None:
            self._joints.foresight.changes(new, by_load=by_load)

    def _left_out(self, wanted: dict[Role, int]) -> list[str]:
        """Returns the routers and nodes to start again if they were left out. A pool that shrinks loses its left-out nodes instead."""
        names = list(self.fleet.routers)
        for role, size in wanted.items():
            staying = self.pools.state.staying(role)
            if size + plan.surge(self._config, self.pools.state, role) >= len(staying):
                names += [record.node_id for record in staying]
        return names

    async def _resize(self, wanted: Mapping[Role, int]) -> None:
        """Does what the load needs. Requires `writing`."""
        new = operator_changes.resized(self._config, self.pools.state, self.pools.facts(), wanted)
        self._foretell_change(new, by_load=True)
        await self.pools.change_to(new)

    async def _change_load(self, new: ClusterState) -> None:
        """Makes a change after which what wings measured does not count. Requires `writing`."""
        await self.pools.change_to(new)
        for changed in self._joints.changed:
            changed()

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        async with self.pools.writing():
            state = self.pools.state
            record = state.known(node_id)
            if not record.leaving:
                new = operator_changes.drained(self._config, state, self.pools.facts(), record)
                self._foretell_change(new)
                await self.pools.change_to(new, {node_id: timeout_s})
                self.pools.note(f"{node_id} is drained, as asked")
            (departure,) = self._departures([node_id])
        return await asyncio.shield(departure)

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        deadline = self._clock.now() + timeout_s
        async with self.pools.writing():
            facts = self.pools.facts()
            new, going = operator_changes.evacuated(self.pools.state, facts, address)
            await self.pools.change_to(new, dict.fromkeys(going, timeout_s))
            self.pools.note(f"{address} is evacuated, as asked: {counted(len(going), 'node')}")
            departures = self._departures(going)
            hosts = [host for host in facts.hosts if host.address == address]
            routers = [r for r in self.fleet.routers.values() if r.runs_on(hosts)]
        finished = await asyncio.gather(*map(asyncio.shield, departures))
        # Routers come last, because streams of these nodes may go through them.
        left_s = max(0.0, deadline - self._clock.now())
        await asyncio.gather(*(router.drain(left_s) for router in routers))
        return dict(zip(going, finished, strict=True))

    def _departures(self, names: Sequence[str]) -> list[asyncio.Task[bool]]:
        """Raises Unavailable while this controller has not taken over: it then drains them by itself when it has."""
        under_way = self.pools.departures.nodes
        if any(name not in under_way for name in names):
            raise Unavailable("this controller has not taken over from the last one yet: try again")
        return [under_way[name] for name in names]

    async def configuration(self) -> TandemConfig:
        await self.pools.has_read.wait()  # what is applied may be another one than this process was given
        return self._config

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        async with self.pools.writing():
            running, state = self._config, self.pools.state
            wanted, found = applied(running, config), difference(running, config)
            change = operator_changes.describe_difference(state, found)
            if dry_run or not (found.sizes or found.at_once or found.nodes or found.routers):
                return change
            new = operator_changes.with_config(running, state, self.pools.facts(), wanted, found, time.time())
            self._foretell_change(new)
            await self.pools.change_config(new)
            self._begin_wings()
            for line in change.at_once:
                self.pools.note(f"applied: {line}")
            return msgspec.structs.replace(change, revision=self.pools.state.revision.number)

    async def go_back(self) -> None:
        async with self.pools.writing():
            rollout = self.pools.state.rollout
            if rollout is None:
                raise ConfigurationError("no rollout is running: there is nothing to take back")
            if not rollout.going_back:
                await self.pools.go_back("as asked")

    async def pause(self, names: list[str]) -> list[str]:
        async with self.pools.writing():
            return await self._change_pauses(operator_changes.paused(self.pools.state, names))

    async def resume(self, names: list[str]) -> list[str]:
        async with self.pools.writing():
            return await self._change_pauses(operator_changes.resumed(self.pools.state, names))

    async def _change_pauses(self, new: ClusterState) -> list[str]:
        """Requires `writing`. Requests that waited during a pause were no load."""
        if new.paused != self.pools.state.paused:
            await self._change_load(new)
            names = ", ".join(new.paused)
            self.pools.note(f"paused, as asked: {names}" if names else "nothing is paused any more")
        return new.paused

    async def reset_cache(self, names: list[str]) -> list[str]:
        async with self.pools.writing():  # before that the nodes are not known
            operator_changes.check_names(self.pools.state, names)
        chosen = [
            node
            for node in self.fleet.nodes.values()
            if node.may_serve and (not names or node.name in names or node.config.role.value in names)
        ]
        answers = await asyncio.gather(*(node.reset_cache() for node in chosen))
        done = sorted(node.name for node, reset in zip(chosen, answers, strict=True) if reset)
        await asyncio.gather(*(router.forget_prefixes(done) for router in self.fleet.routers.values()))
        self.pools.note(f"the prefix cache was emptied, as asked: {', '.join(done) or 'of no node'}")
        if silent := sorted({node.name for node in chosen} - {*done}):
            raise Unavailable(f"{', '.join(silent)} did not confirm that the prefix cache is empty: try again")
        return done

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        others = {CONTROLLER, *self.fleet.routers}
        for node in self.fleet.nodes.values():
            others.update(node.log_sources())
        operator_changes.check_names(self.pools.state, [name for name in query.names if name not in others])
        return await collected_logs(self.fleet, query, self._clock)

    async def change_role(self, node_id: str, role: Role) -> None:
        async with self.pools.writing():
            state = self.pools.state
            record = state.known(node_id)
            if record.role is not role:
                new = operator_changes.with_role(self._config, state, self.pools.facts(), record, role)
                self._foretell_change(new)
                await self.pools.change_to(new)
                self.pools.note(f"{node_id} becomes a {role.value} node, as asked")
            elif self.fleet.retry(node_id):
                self.pools.note(f"{node_id} was left out and is tried again")
            change, node = self.pools.role_changes.get(node_id), self.fleet.nodes.get(node_id)
        if change is not None:
            await asyncio.shield(change)
        elif node is not None:
            await node.settled()
            if node.phase is ProcessPhase.LEFT_OUT:
                raise Unavailable(f"{node_id} did not start: {node.detail}")
