"""The recorded state, and the one task that changes nodes and routers until they are as wanted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, TandemError
from tandem.base.tasks import Tasks
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ControllerDecision
from tandem.cluster.describe import counted
from tandem.cluster.events import Events
from tandem.cluster.launcher import FixModel, Host, Hosts, Launcher, TakenPlace
from tandem.cluster.pools import plan, state
from tandem.cluster.pools.departures import Departures
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.placement import node_config
from tandem.cluster.pools.revision_configs import RevisionConfigs, as_in_this_process, at_commit, resolve
from tandem.cluster.pools.room import needed_by, needs_of
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.cluster.pools.supervisor import AdapterPlaces, StateChange
from tandem.cluster.pools.turn import LaterController, Turn
from tandem.cluster.pools.view import pool_reports
from tandem.cluster.tasks import Clock, Wakeup, first_of, has_ended
from tandem.wire.nodes import COMPUTED_BY, NodeInfo, PoolReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DECISIONS_KEPT = 20
_AS_CONFIGURED: Mapping[str, float] = {}
_LOOK_AGAIN_S = 5.0  # how often the machines are looked at without an announced change


class Reconciler:
    """Only `keep` replaces `state`, and only while `writing` is held. Every change is recorded before it is carried out."""

    def __init__(
        self,
        config: TandemConfig,
        hosts: Hosts,
        launcher: Launcher,
        turn: Turn,
        events: Events,
        clock: Clock,
        tasks: Tasks,
        fix_model: FixModel,
    ) -> None:
        self.config = config  # as the operator wants it
        # Called with each new configuration
        self.on_config: list[Callable[[TandemConfig], None]] = []
        self._given = config  # with which this process was created, maybe long ago
        self._hosts = hosts
        self._turn = turn
        self._clock = clock
        self._tasks = tasks
        self.fix_model = fix_model
        self._wake = asyncio.Event()
        self.state = state.first_state(config.pools)
        # Set when another version wrote the recorded state, or a later controller has begun
        self._refused: state.UnknownState | LaterController | None = None
        self._contents: dict[int, str] = {}  # the model's content by revision, even if recording it failed
        # Carries out the recorded rollout; None: this installation cannot
        self.roll_out: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.rollout_waits = ""  # what the rollout is waiting for
        self._lock = asyncio.Lock()
        self.has_read = asyncio.Event()  # set once it is known what an earlier controller recorded
        self.changed = Wakeup()  # rung when anything changes that a view shows
        self.machines: list[Host] = []
        self._unseen: set[str] = set()  # machines that Ray does not see while their processes are heard
        self.has_looked = False  # whether one full round of `run` is done
        self.changing_adapters = asyncio.Lock()
        self.decisions: deque[ControllerDecision] = deque(maxlen=_DECISIONS_KEPT)
        self._records = False  # whether a task is about to record the state
        self._is_unsure = False  # whether the last record may have been written, or not
        self.fleet = Fleet(config, self, launcher, events, clock, tasks)
        self.departures = Departures(self, self.fleet, clock, tasks)
        self.role_changes: dict[str, asyncio.Task[None]] = {}
        self._has_taken_over = False

    def pool_reports(self) -> list[PoolReport]:
        return pool_reports(self.fleet.config, self.state, self.facts())

    async def confirm(self) -> None:
        await self._turn.confirm()

    def facts(self) -> Facts:
        return self.fleet.facts(self.machines)

    def is_lost(self, name: str) -> bool:
        node, router = self.state.find(name), self.state.router(name)
        if node is not None:
            return bool(plan.why_lost(node, {host.name for host in self.machines}, self.fleet.unseen))
        return router is not None and router.place not in {"", *(host.address for host in self.machines)}

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Held by one task at a time. Orders wait for it until `take_over` is done: one that came first would otherwise record a
        cluster without the nodes that serve."""
        await self.has_read.wait()
        async with self._lock:
            yield

    async def take_over(self) -> None:
        """Adopts what an earlier controller left. Running routers are first told what they were told last, so nothing changes for
        them."""
        async with self._lock:
            kept = await self._until_answered(self._turn.load, "what the previous controller recorded")
            try:
                if kept is not None:
                    self.state = state.decode(kept)
                    self._refused = None
                    self.decisions.clear()
                    self.decisions.extend(self.state.decisions)
                    self.config = as_in_this_process(self.state.revision.config, self._given)
            except state.UnknownState as error:
                self._refused = error
                raise
            finally:
                self.has_read.set()
            try:
                await self._save(self.state)  # from here on an earlier controller records nothing
            except TandemError as error:
                logger.warning("an earlier controller that still runs may not notice this one yet: %s", error)
            await self._fix_the_model()
            if kept is None:
                self._has_taken_over = True
                return
            await self.fleet.membership.pause(self.state.paused)
            for router in self.state.routers:
                if router.info is not None:
                    await self.fleet.membership.announce_router(router.name, router.info)
            machines = await self._machines_of(self.state)
            unseen = self.state.unseen_machines([host.name for host in machines])
            self.fleet.unseen.update((host.name, asyncio.Event()) for host in unseen)
            self.machines = [*machines, *unseen]
            there = {host.name for host in self.machines}
            for node in self.state.nodes:
                if node.info is not None and node.placement is not None and node.placement.host in there:
                    await self.fleet.membership.announce(node.info)
            self._has_taken_over = True
            self._carry_out()
            if self.state.rollout is not None:
                self._begin_rollout("goes on")
        self.note(f"took over {counted(len(self.fleet.nodes), 'node')} from an earlier controller")

    async def _fix_the_model(self) -> None:
        """Replaces the model's name on the hub by the commit for which it stands now, so that every node loads the same, however late
        it starts. Requires `writing`."""
        resolved = await resolve(self.state, self._given, self.fix_model)
        self._use(resolved)
        if resolved.commit:
            if resolved.commit != self.state.revision.commit:
                await self.keep(at_commit(self.state, resolved.commit))
            self.note(f"serves {self.config.model.path} at commit {resolved.commit}")

    def _use(self, resolved: RevisionConfigs) -> None:
        """Uses the recorded configuration from now on."""
        self.config = resolved.config
        self.fleet.use(resolved.fixed, resolved.by_revision)
        for use in self.on_config:
            use(self.config)

    async def keep_and_use(self, new: ClusterState) -> None:
        """Records a state with another configuration and uses it, or raises and changes nothing. Requires `writing`."""
        resolved = await resolve(new, self._given, self.fix_model)
        await self.keep(at_commit(new, resolved.commit))
        self._use(resolved)

    async def _machines_of(self, known: ClusterState) -> list[Host]:
        """Returns the machines that exist. Waits up to `timeouts.unresponsive_s` for those with nodes on them: after a restart of
        Ray's head it takes a while until Ray sees them again."""
        needed = {host for record in known.nodes if record.placement is not None for host in record.placement.hosts}
        deadline = self._clock.now() + self.config.timeouts.unresponsive_s
        self._hosts.use(needs_of(self.fleet.config), self._taken_places())
        while True:
            machines = await self._until_answered(self._hosts.present, "the list of machines")
            left = deadline - self._clock.now()
            if left <= 0 or needed <= {host.name for host in machines}:
                return machines
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(left, self._hosts.changed(left), "a change of the machines")

    def _taken_places(self) -> list[TakenPlace]:
        """Returns the place of every node, with the resources that its own revision asks for."""
        return [
            TakenPlace(there.host, there.slot, needed_by(there.slot, needs_of(self.fleet.config_of(node.revision))))
            for node in self.state.nodes
            if node.placement is not None
            for there in node.placement.parts
        ]

    async def _until_answered(self, ask: Callable[[], Awaitable[T]], what: str) -> T:
        """Repeats the question until it is answered. Giving up would leave running nodes without a controller."""
        while True:
            try:
                return await ask()
            except TandemError as error:
                logger.warning("cannot read %s yet: %s", what, error)
                await self._clock.sleep(self.config.timeouts.heartbeat_s)

    # --- recording

    async def update(self, change: StateChange) -> None:
        async with self.writing():
            await self.keep(change(self.state))

    async def keep(self, new: ClusterState) -> None:
        """Records the new state, with what processes have become meanwhile. If that fails, it raises and the state stays as it was.
        Requires `writing`."""
        if self._refused is not None:
            raise self._refused
        new = plan.as_it_runs(new, self.facts())
        new = msgspec.structs.replace(new, decisions=list(self.decisions))
        if new == self.state and not self._is_unsure:
            return
        self._is_unsure = True
        try:
            await self._save(new)
        except TandemError:
            self._record_soon()  # what stays as it was, or the next controller might do what was refused
            raise
        self._is_unsure = False
        self.state = new
        await self.fleet.membership.pause(new.paused)
        self.changed.ring()

    async def _save(self, new: ClusterState) -> None:
        try:
            await self._turn.save(state.encode(msgspec.structs.replace(new, writer=self._turn.name)))
        except LaterController as error:
            self._refused = error
            raise

    def check(self, info: NodeInfo) -> None:
        """The first node of a revision fixes its content. KV of one content is useless on a node of another."""
        record = self.state.find(info.node_id)
        number = self.state.revision.number if record is None else record.revision
        content = self._contents.setdefault(number, self._kept_content(number) or info.content)
        if info.content != content:
            raise ConfigurationError(_why_other(info.content, content, self.fleet.config.model.path))
        self._check_tokenizer(info, number)

    async def record(self, what: str) -> None:
        try:
            await self.update(lambda current: current)
        except TandemError as error:
            logger.warning("%s, but that could not be recorded yet: %s", what, error)

    def _kept_content(self, number: int) -> str:
        revision = self.state.revision_of(number)
        return revision.content if revision is not None else ""

    def adapters_of(self, node_id: str) -> AdapterPlaces | None:
        record = self.state.find(node_id)
        number = self.state.revision.number if record is None else record.revision
        config, revision = self.fleet.config_of(number), self.state.revision_of(number)
        if not config.scheduler.max_loras:
            return None
        loaded = revision.adapters if revision is not None else None
        return config.model.adapters if loaded is None else loaded

    def _check_tokenizer(self, info: NodeInfo, number: int) -> None:
        """Raises ConfigurationError if the tokenizer differs from the previous revision's: routers use that, and could not send prompts."""
        if self.state.rollout is None or number != self.state.revision.number:
            return
        for other in self.state.nodes:
            known = other.info.tokenizer if other.info is not None and other.revision != number else ""
            if known and info.tokenizer and known != info.tokenizer:
                raise ConfigurationError(
                    "its tokenizer.json differs from the one that the routers use, so they cannot send it prompts: a model with another "
                    "tokenizer needs `tandem down` and `tandem serve`, or a second deployment"
                )

    def note(self, text: str) -> None:
        logger.info("%s", text)
        self.decisions.append(ControllerDecision(time.time(), text))
        self.changed.ring()
        self._record_soon()

    def _record_soon(self) -> None:
        """Records the state as it is, with the latest decisions."""
        if not self._records:
            self._records = True
            self._tasks.spawn(self._record(), "record")

    async def _record(self) -> None:
        while self._is_unsure or list(self.decisions) != self.state.decisions:
            try:
                async with self.writing():
                    await self.keep(self.state)
            except TandemError as error:
                logger.warning("the state could not be recorded: %s", error)
                if not self._is_unsure:
                    break
                await self._clock.sleep(self.config.timeouts.heartbeat_s)
        self._records = False

    # --- changing the pools

    def wake(self) -> None:
        """Call this when what is wanted has changed."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                async with self._hosts.placing():
                    await self._look()
                    await self._converge()
                await self._turn.confirm()
                await self._hosts.want(plan.needed_slots(self.state, self.fleet.config.pools))
                self.has_looked = True
                self.changed.ring()
                await self._until_woken()
            except TandemError as error:
                logger.warning("cannot look after the pools; trying again: %s", error)
                await self._clock.sleep(self.config.timeouts.heartbeat_s)

    async def _look(self) -> None:
        """Updates `machines`. A machine that Ray no longer sees is kept, with its nodes, as long as routers or clients hear them."""
        self._hosts.use(needs_of(self.fleet.config), self._taken_places())
        present = await self._hosts.present()
        seen = {host.name for host in present}
        self.fleet.machines_are_seen(present)
        kept = []
        for host in self.machines:
            if host.name in seen:
                self._unseen.discard(host.name)
            elif await self.fleet.may_serve_on(host):
                kept.append(self.fleet.without_room(host))
                if host.name not in self._unseen:
                    self._unseen.add(host.name)
                    self.note(f"the machine {host.address} is not seen, but its processes are heard: it is kept")
            else:
                self._unseen.discard(host.name)
        self.machines = [*present, *kept]

    async def _until_woken(self) -> None:
        woken = self._until_woken_or_late() if self._unseen else self._wake.wait()
        _, changed = await first_of(woken, self._hosts.changed(_LOOK_AGAIN_S))
        if has_ended(changed):
            changed.result()

    async def _until_woken_or_late(self) -> None:
        with contextlib.suppress(DeadlineExceeded):
            await self._clock.within(self.config.timeouts.heartbeat_s, self._wake.wait(), "a wish")

    async def _converge(self) -> None:
        """Records all changes that are due, then carries them out."""
        async with self.writing():
            new, facts, config = self.state, self.facts(), self.fleet.config
            changes: list[plan.Change] = [*plan.router_changes(config, new, facts)]
            for change in changes:
                new = change.apply(new)
            while (next_one := plan.next_change(config, new, facts)) is not None:
                new = next_one.apply(new)
                changes.append(next_one)
                await asyncio.sleep(0)  # a thousand nodes take seconds: others are answered meanwhile
            try:
                await self.keep(new)
            finally:
                self._carry_out()
            for why in (change.why for change in changes if change.why):
                self.note(why)

    async def make(self, change: plan.Change) -> None:
        """Records one change and carries it out. Requires `writing`."""
        await self.change_to(change.apply(self.state))
        if change.why:
            self.note(change.why)

    async def change_to(self, new: ClusterState, drain_s: Mapping[str, float] = _AS_CONFIGURED) -> None:
        """Records the state and carries it out, at once where it needs no machine. Requires `writing`. `drain_s` says how long these
        nodes may take for their requests if they are to leave."""
        await self.keep(new)
        self._carry_out(drain_s)
        self.wake()

    def _carry_out(self, drain_s: Mapping[str, float] = _AS_CONFIGURED) -> None:
        """Starts or adopts what is recorded, changes roles, and lets go what is to leave. Requires `writing`."""
        if not self._has_taken_over:
            return  # what runs is not known yet
        fleet, leaving = self.fleet, self.departures
        machines = {host.name: host for host in self.machines}
        for node in self.state.nodes:
            there = machines.get(node.placement.host) if node.placement is not None else None
            is_seen = there is not None and there.name not in fleet.unseen
            if node.node_id in leaving.nodes:
                continue
            if node.node_id not in fleet.nodes and node.placement and there and (is_seen or node.info):
                fleet.launch_node(node, node.placement, there)
            if node.leaving:
                limit_s = drain_s.get(node.node_id, self.config.timeouts.nodes.drain_s)
                # The last one that decodes serves until the one that replaces it has started.
                stay_s = limit_s / 2 if node.is_on({*self.state.evacuated}) else 0.0
                leaving.begin(node.node_id, limit_s, stay_s)
            elif node.node_id in fleet.nodes:
                self._follow_role(node, fleet.nodes[node.node_id])
        places = plan.router_places(fleet.config, self.machines)
        at = {"": None} | {host.address: host for host in self.machines} | dict(places)
        for router in self.state.routers:
            if router.name in leaving.routers:
                continue
            host = at.get(router.place)
            is_seen = router.place in at and (host is None or host.name not in fleet.unseen)
            if router.name not in fleet.routers and is_seen:
                config = plan.starting_config(fleet.config, self.state, router)
                fleet.launch_router(msgspec.structs.replace(router, config=config), host)
            if router.leaving and (router.name in fleet.routers or router.place not in at):
                leaving.begin_router(router.name, is_replaced=router.place in places)

    def _follow_role(self, record: NodeRecord, supervisor: NodeSupervisor) -> None:
        name, placement = record.node_id, record.placement
        if supervisor.config.role is record.role or placement is None or name in self.role_changes:
            return
        config = node_config(self.fleet.config_of(record.revision), name, record.role, placement)
        work = supervisor.change_role(config, self.config.timeouts.nodes.drain_s)
        self.role_changes[name] = task = self._tasks.spawn(work, f"change the role of {name}", asked=True)
        task.add_done_callback(lambda _: self.role_changes.pop(name, None))

    # --- another configuration

    async def change_config(self, new: ClusterState) -> None:
        """Records a state with another configuration, and starts to roll it out if nodes or routers read a changed setting at their start.
        If it raises, nothing has changed. Requires `writing`."""
        if new.rollout is not None and self.roll_out is None:
            raise ConfigurationError(
                "nodes and routers of this installation are not replaced while it serves: `tandem down`, then `tandem serve`"
            )
        await self.keep_and_use(new)
        if new.rollout is not None:
            self._begin_rollout("begins")
        self.wake()

    async def go_back(self, why: str) -> None:
        """Starts to take back the rollout. Requires `writing`."""
        await self.keep_and_use(self.state.going_back(why))
        self.note(f"the rollout is taken back: {why}")
        self.wake()

    def _begin_rollout(self, how: str) -> None:
        self.note(
            f"rollout of revision {self.state.revision.number} {how}: nodes and routers that read a changed setting are replaced one by one"
        )
        if self.roll_out is not None:
            self._tasks.spawn(self.roll_out(), "roll out")


def _why_other(mine: str, theirs: str, path: str) -> str:
    """What to say of a node whose content is not the other nodes'."""
    files, _, way = mine.partition(COMPUTED_BY)
    other_files, _, other_way = theirs.partition(COMPUTED_BY)
    if files == other_files:
        return (
            f"it would not give the same bits as the other nodes, and model.exact is require: it computes by {way or 'any means'}, and they "
            f"by {other_way or 'any means'}. Give the cluster machines whose processors, torch and native library are alike, or set "
            "model.exact to auto"
        )
    return (
        f"its model is not the one that this cluster serves: the weights, configuration or tokenizer in {path!r} on its machine have "
        f"content {files[:12]}, and the other nodes' have {other_files[:12]}. Put the same files on every machine. To serve another "
        "model, give `tandem apply` another folder or revision"
    )
