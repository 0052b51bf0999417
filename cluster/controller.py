"""Keeps a deployment what it should be: pools of the size that was asked for, on the machines that there are.

Plain asyncio, no Ray: where machines come from is `Hosts`' business, where processes run the launcher's. Everything
that the next controller must know is kept before it is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from cluster import plan, state
from cluster.clock import Clock, cancel
from cluster.config import TandemConfig
from cluster.control import ClusterView, Decision
from cluster.describe import counted
from cluster.events import Events
from cluster.fleet import HEAD_ROUTER, Fleet
from cluster.hosts import Host, Hosts, StateStore
from cluster.launcher import Launcher
from cluster.placement import node_config
from cluster.state import ClosedSlot, ClusterState, NodeRecord
from cluster.supervisor import Phase
from cluster.tasks import Bell, Tasks
from cluster.view import cluster_view
from wire.errors import ConfigurationError, InternalError, TandemError, Unavailable
from wire.nodes import NodeInfo, Role

logger = logging.getLogger(__name__)

_DECISIONS_KEPT = 20
_LOOK_AGAIN_S = 5.0  # at the machines, although nobody said that they changed


class Controller:
    """`start`, then `failed` for as long as it serves, then `drain` if there is time, then `stop`. Implements
    `cluster.control.Control`. Made inside a running event loop."""

    def __init__(
        self,
        config: TandemConfig,
        hosts: Hosts,
        launcher: Launcher,
        store: StateStore,
        events: Events,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._store = store
        self._events = events
        self._clock = clock or Clock()
        self._tasks = Tasks()
        self._changed = Bell()  # anything that `view` tells
        self._wake = asyncio.Event()  # something that the next look at the whole must consider
        self._looked = False  # at the whole, once
        self._writing = asyncio.Lock()
        self._state = state.first_state(config.pools)
        self._machines: list[Host] = []
        self._asked_for: dict[Role, int] | None = None
        self._retiring: dict[str, asyncio.Task[bool]] = {}
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._decisions: deque[Decision] = deque(maxlen=_DECISIONS_KEPT)
        self._fleet = Fleet(config, launcher, events, self._clock, self._tasks, self._changed, self._remember)

    @property
    def members(self) -> list[NodeInfo]:
        """The nodes that routers are told of."""
        return self._fleet.membership.members

    @property
    def url(self) -> str:
        return self._fleet.routers[HEAD_ROUTER].url

    # --- its life

    async def start(self) -> None:
        """Starts everything at once, or takes over what an earlier controller started. Returns when each part that
        has a machine is ready or left out, and together they can answer; raises Unavailable when they cannot."""
        await self._take_over()
        self._tasks.spawn(self._reconcile(), "reconcile")
        started = asyncio.ensure_future(self._until_answering())
        failed = asyncio.ensure_future(self._tasks.failed())
        try:
            either: list[asyncio.Future[Any]] = [started, failed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise InternalError(failed.result())
            started.result()
        finally:
            await cancel(started)
            await cancel(failed)

    async def failed(self) -> str:
        """Returns when the controller itself can no longer do its work, with the reason."""
        return await self._tasks.failed()

    async def drain(self) -> bool:
        return await self._fleet.drain(self._config.timeouts.nodes.drain_s)

    async def stop(self) -> None:
        """Ends every process. Idempotent; whatever is still running is lost."""
        await self._tasks.stop()
        await self._fleet.stop()

    async def _take_over(self) -> None:
        """Routers that run are told at first what they were told last: to them nothing has happened."""
        kept = await self._store.load()
        if kept is None:
            return
        self._state = state.decode(kept)
        machines = {host.name: host for host in await self._machines_of(self._state)}
        for record in self._state.nodes:
            host = machines.get(record.placement.host) if record.placement else None
            if record.placement is None or host is None:
                continue
            if record.info is not None:
                await self._fleet.membership.announce(record.info)
            self._fleet.launch_node(record, record.placement, host)
        for record in self._state.nodes:
            if record.leaving:
                self._begin_to_retire(record.node_id, self._config.timeouts.nodes.drain_s)
        self._note(f"took over {counted(len(self._fleet.nodes), 'node')} from an earlier controller")

    async def _machines_of(self, known: ClusterState) -> list[Host]:
        """Those that nodes run on may take a while to be seen again, when all of Ray's head was started anew."""
        needed = {record.placement.host for record in known.nodes if record.placement is not None}
        deadline = self._clock.now() + self._config.timeouts.unresponsive_s
        while True:
            machines = await self._hosts.present()
            left = deadline - self._clock.now()
            if left <= 0 or needed <= {host.name for host in machines}:
                return machines
            await self._hosts.changed(left)

    async def _until_answering(self) -> None:
        deadline = self._clock.now() + self._config.timeouts.machines_s
        while not self._is_answering():
            await self._clock.within(
                deadline - self._clock.now(), self._changed.wait(), "waiting for the first nodes to be ready"
            )

    def _is_answering(self) -> bool:
        """False: it may still come to that. Raises Unavailable when it will not."""
        if not self._looked or not all(part.has_settled for part in self._fleet.parts):
            return False
        router = self._fleet.routers[HEAD_ROUTER]
        if router.phase is Phase.LEFT_OUT:
            raise Unavailable(f"the router cannot start: {router.detail}")
        writers = [node for node in self._fleet.nodes.values() if node.config.role is not Role.PREFILL]
        if any(node.phase is not Phase.LEFT_OUT for node in writers):
            return True
        if not writers:
            self._events.progress("machines", "waiting for one with room for a node that writes answers", 0.0)
            return False
        reasons = "; ".join(sorted({f"{node.name}: {node.detail}" for node in writers}))
        raise Unavailable(f"no node that can write answers has started: {reasons}")

    # --- what is kept

    async def _update(self, change: Callable[[ClusterState], ClusterState]) -> None:
        async with self._writing:
            await self._keep(change(self._state))

    async def _keep(self, new: ClusterState) -> None:
        """Holding `_writing`. What could not be kept has not happened."""
        if new != self._state:
            await self._store.save(state.encode(new))
            self._state = new
            self._changed.ring()

    async def _remember(self, info: NodeInfo) -> None:
        def with_info(current: ClusterState) -> ClusterState:
            record = current.find(info.node_id)
            return (
                current if record is None else current.with_node(msgspec.structs.replace(record, info=info))
            )

        try:
            await self._update(with_info)
        except TandemError as error:
            # Until it is kept, the next controller takes it for a node that it does not know yet: a short detour.
            logger.warning("%s serves, but that could not be kept: %s", info.node_id, error)

    def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._decisions.append(Decision(time.time(), text))
        self._changed.ring()

    # --- towards what is wanted

    async def _reconcile(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._machines = await self._hosts.present()
                self._fleet.sync_routers(self._machines)
                await self._converge()
                await self._ask_for_machines()
                self._looked = True
                self._changed.ring()
                await self._until_woken()
            except TandemError as error:
                logger.warning("cannot look after the pools: %s", error)
                await self._clock.sleep(self._config.timeouts.heartbeat_s)

    async def _until_woken(self) -> None:
        wake = asyncio.ensure_future(self._wake.wait())
        changed = asyncio.ensure_future(self._hosts.changed(_LOOK_AGAIN_S))
        try:
            either: list[asyncio.Future[Any]] = [wake, changed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                changed.result()
        finally:
            await cancel(wake)
            await cancel(changed)

    async def _converge(self) -> None:
        while True:
            async with self._writing:
                change = plan.next_change(self._config, self._state, self._machines, self._rank)
                if change is None:
                    return
                await self._keep(change.apply(self._state))
                self._carry_out(change)

    def _rank(self, record: NodeRecord) -> int:
        supervisor = self._fleet.nodes.get(record.node_id)
        phase = supervisor.phase if supervisor is not None else Phase.STARTING
        return {Phase.READY: 0, Phase.LEFT_OUT: 2}.get(phase, 1)

    def _carry_out(self, change: plan.Change) -> None:
        match change:
            case plan.Place(node, placement):
                host = next(host for host in self._machines if host.name == placement.host)
                self._fleet.launch_node(node, placement, host)
            case plan.Retire(node):
                self._begin_to_retire(node.node_id, self._config.timeouts.nodes.drain_s)
            case plan.Lose(node):
                address = node.placement.address if node.placement else ""
                self._note(f"{node.node_id} is lost: its machine {address} is gone")
                self._tasks.spawn(self._fleet.end_node(node.node_id), f"end {node.node_id}")
            case plan.Add():
                pass  # it gets a machine with the next change, or waits for one

    async def _ask_for_machines(self) -> None:
        needed = plan.needed_slots(self._state)
        if needed != self._asked_for:
            await self._hosts.want(needed)
            self._asked_for = needed

    # --- nodes that go

    def _begin_to_retire(self, node_id: str, limit_s: float) -> asyncio.Task[bool]:
        task = self._tasks.spawn(self._retire(node_id, limit_s), f"retire {node_id}")
        self._retiring[node_id] = task
        task.add_done_callback(lambda _: self._retiring.pop(node_id, None))
        return task

    async def _retire(self, node_id: str, limit_s: float) -> bool:
        supervisor = self._fleet.nodes.get(node_id)
        finished = supervisor is None or await supervisor.leave(limit_s)
        await self._fleet.end_node(node_id)
        while True:
            try:
                await self._update(lambda current: current.without(node_id))
                break
            except TandemError as error:
                logger.warning("%s is gone, but that could not be kept: %s", node_id, error)
                await self._clock.sleep(self._config.timeouts.heartbeat_s)
        self._note(
            f"{node_id} is gone" + ("" if finished else "; what it had not finished goes on elsewhere")
        )
        self._wake.set()
        return finished

    # --- cluster.control.Control

    async def view(self) -> ClusterView:
        return cluster_view(
            self._config, self._state, self._machines, self._fleet, list(self._decisions), self._tasks.failure
        )

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        for role, size in wanted.items():
            self._check_limits(role, size)
        lines: list[str] = []
        async with self._writing:
            new = self._state.with_sizes(wanted)
            self._check_writers(new)
            for role, size in wanted.items():
                lines.append(self._describe_scaling(role, size))
            await self._keep(new)
        for record in self._state.nodes:
            if record.role in wanted and self._fleet.retry(record.node_id):
                lines.append(f"{record.node_id} was left out and is tried again")
        for line in lines:
            self._note(line)
        self._wake.set()
        return lines

    def _describe_scaling(self, role: Role, size: int) -> str:
        current = len(self._state.staying(role))
        if size > current:
            return f"{role.value}: from {current} to {size}, {counted(size - current, 'node')} more"
        if size < current:
            return f"{role.value}: from {current} to {size}, {counted(current - size, 'node')} drained"
        return f"{role.value}: stays at {size}"

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        async with self._writing:
            record = self._known(node_id)
            if not record.leaving:
                self._check_may_go(record)
                await self._keep(self._without_its_place(record))
                self._note(f"{node_id} is drained, as asked")
                self._begin_to_retire(node_id, timeout_s)
            task = self._retiring[node_id]
        self._wake.set()
        return await asyncio.shield(task)

    def _without_its_place(self, record: NodeRecord) -> ClusterState:
        new = self._state.with_node(msgspec.structs.replace(record, leaving=True))
        if new.sizes[record.role] is None and record.placement is not None:
            slot = ClosedSlot(record.placement.host, record.placement.slot)
            return msgspec.structs.replace(new, closed=[*new.closed, slot])
        return new.resized(record.role, -1)

    async def change_role(self, node_id: str, role: Role) -> None:
        async with self._writing:
            record = self._known(node_id)
            if record.role is not role:
                self._begin_to_change(record, role, await self._keep_role(record, role))
            task = self._changing.get(node_id)
        self._wake.set()
        if task is not None:
            await asyncio.shield(task)

    async def _keep_role(self, record: NodeRecord, role: Role) -> ClusterState:
        supervisor = self._fleet.nodes.get(record.node_id)
        if record.leaving or supervisor is None or supervisor.phase is not Phase.READY:
            phase = "waiting for a machine" if supervisor is None else supervisor.phase.value
            raise Unavailable(f"{record.node_id} is {phase}: only a node that is ready can change its role")
        self._check_may_go(record)
        self._check_limits(role, self._wanted(role) + 1)
        new = self._state.with_node(msgspec.structs.replace(record, role=role))
        await self._keep(new.resized(record.role, -1).resized(role, +1))
        return self._state

    def _begin_to_change(self, record: NodeRecord, role: Role, kept: ClusterState) -> None:
        placement = record.placement
        if placement is None:
            raise InternalError(f"{record.node_id} is ready without a place")
        self._note(f"{record.node_id} becomes a {role.value} node, as asked")
        supervisor = self._fleet.nodes[record.node_id]
        config = node_config(self._config, record.node_id, role, placement)
        task = self._tasks.spawn(
            supervisor.change_role(config, self._config.timeouts.nodes.drain_s),
            f"change the role of {record.node_id}",
            asked=True,
        )
        self._changing[record.node_id] = task
        task.add_done_callback(lambda _: self._changing.pop(record.node_id, None))

    # --- what may not be asked for

    def _known(self, node_id: str) -> NodeRecord:
        record = self._state.find(node_id)
        if record is None:
            ids = ", ".join(node.node_id for node in self._state.nodes) or "none"
            raise ConfigurationError(f"there is no node {node_id}; there are: {ids}")
        return record

    def _wanted(self, role: Role) -> int:
        return plan.wanted_size(self._state, plan.open_hosts(self._state, self._machines), role)

    def _check_limits(self, role: Role, size: int) -> None:
        pool = self._config.pools.of(role)
        if size < pool.min:
            raise ConfigurationError(
                f"pools.{role.value}.min is {pool.min}: it cannot have {counted(size, 'node')}"
            )
        if pool.max is not None and size > pool.max:
            raise ConfigurationError(
                f"pools.{role.value}.max is {pool.max}: it cannot have {counted(size, 'node')}"
            )

    @staticmethod
    def _wanted_writers(current: ClusterState) -> int:
        sizes = (current.sizes[role] for role in Role if role is not Role.PREFILL)
        return sum(1 if size is None else size for size in sizes)

    def _check_writers(self, new: ClusterState) -> None:
        if self._wanted_writers(new) < 1:
            raise ConfigurationError("nobody could write answers: keep at least 1 decode or aggregated node")

    def _check_may_go(self, record: NodeRecord) -> None:
        """Its pool can do without it."""
        role = record.role
        self._check_limits(role, self._wanted(role) - 1)
        if role is Role.PREFILL:
            return
        others = [
            node
            for node in self._fleet.nodes.values()
            if node.name != record.node_id
            and node.config.role is not Role.PREFILL
            and node.phase is Phase.READY
        ]
        if not others:
            raise ConfigurationError(
                f"{record.node_id} is the last node that can write answers: `tandem scale {role.value}="
                f"{self._wanted(role) + 1}` first"
            )
