"""One schedule of the control plane: the product's controller over simulated Ray, with operators' orders and faults by a seed; then
everything heals. `python -m tests.world.search --worlds control --seeds 7 --history` shows one. What must hold:

- what is done was recorded before, what is recorded can be read, and a record never goes back;
- a controller takes over from another one only after reading all that it recorded; the other one records nothing more and soon
  acts no more;
- a rollout ends in one of its two states, and one that is taken back has a reason that is true;
- an order that is refused changes nothing, and one that is confirmed is kept;
- after the faults every pool has its size, every process has an owner, and routers know exactly the nodes that serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, cast

import msgspec

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.cluster.config import (
    AutoscalingConfig,
    ClusterTimeouts,
    PoolConfig,
    PoolsConfig,
    RolloutConfig,
    TandemConfig,
)
from tandem.cluster.control import ExchangeView
from tandem.cluster.events import Events
from tandem.cluster.launcher import Host
from tandem.cluster.orders import (
    ApplyOrder,
    ChangeRoleOrder,
    DrainOrder,
    EvacuateOrder,
    GoBackOrder,
    Order,
    PauseOrder,
    ResetCacheOrder,
    ResumeOrder,
    ScaleOrder,
)
from tandem.cluster.pools import plan, state
from tandem.cluster.pools.controller import Controller
from tandem.cluster.pools.controller_host import ClusterStage, ControllerHost
from tandem.cluster.pools.state import ClusterState
from tandem.node.config import NodeTimeouts
from tandem.router.config import RouterConfig
from tandem.simulator.clock import VirtualLoop
from tandem.wire.nodes import NodeInfo, Role
from tests.world.control_ray import (
    Actor,
    ControllerClock,
    ControllerProcess,
    NodeActor,
    RouterActor,
    SimulatedHosts,
    SimulatedLauncher,
    SimulatedRay,
    new_task,
)
from tests.world.schedule import Outcome

FAULTS_S = 60.0
UNDER_WAY_S = 6.0  # an older controller looks at the record at least every 5 s
MENDED_S = 2.0  # a record whose answer was lost is made right within this
QUIET_S = 240.0  # after the faults, everything is as it was ordered within this time
PROBE_S = 15.0
ROLES = (Role.PREFILL, Role.DECODE)
_NOT_ON_THE_HUB = "missing/"
DOWN = "down"  # an operator ends the deployment

OnMessage = Callable[[float, str, str, str], None]
"""Told of each message: when, who, whom, what."""

TIMEOUTS = ClusterTimeouts(
    start_s=30.0,
    heartbeat_s=1.0,
    silence_s=2.0,
    unresponsive_s=8.0,
    step_s=30.0,
    restart_backoff_s=0.5,
    restart_backoff_max_s=4.0,
    stop_s=3.0,
    machines_s=20.0,
    nodes=NodeTimeouts(drain_s=10.0),
)

# What a new configuration does, by the hundreds of the setting that tells it apart
GOOD, REFUSED_AT_START, DIES_IN_START, ANSWERS_ERRORS, DIES_LATER = range(1, 6)
KINDS = [GOOD, GOOD, GOOD, REFUSED_AT_START, DIES_IN_START, ANSWERS_ERRORS, DIES_LATER]

replace = msgspec.structs.replace


class _Broken(Exception):
    """A promise was broken: the schedule ends here."""


def run(
    seed: int, *, with_faults: bool = True, without: Collection[str] = (), on_message: OnMessage | None = None
) -> Outcome:
    """`without`: what the seed's schedule has and this one leaves out: orders (o1, o2 ...), faults (f1 ...), machines (m2 ...), deaths of
    controllers at one of their steps (c1 ...), bad luck of processes that start (NAME.1 ...), and DOWN."""
    rng = random.Random(f"control {seed}")
    loop = VirtualLoop()
    loop.set_task_factory(new_task)  # type: ignore[arg-type]
    outcome = Outcome(seed, columns=["operator", "record"])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that a killed controller never began
    before = random.getstate()
    random.seed(seed)
    try:
        schedule = Schedule(loop, rng, outcome, with_faults and rng.random() < 0.8, frozenset(without))
        schedule.on_message = on_message or schedule.on_message
        loop.run_until_complete(schedule.run())
    except _Broken as broken:
        outcome.violations.append(f"control plane: {broken}")
    except Exception as error:  # a task of the product raised
        outcome.violations.append(f"control plane: {type(error).__name__}: {error}")
        outcome.history.append(traceback.format_exc())
    finally:
        random.setstate(before)
        outcome.seconds = loop.time()
        _end(loop)
        logging.disable(logging.NOTSET)
    return outcome


def _end(loop: VirtualLoop) -> None:
    """Ends every task that is left, so that none is heard of later."""
    loop.set_exception_handler(lambda *_: None)
    loop._failure = None
    with contextlib.suppress(Exception):
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        loop.close()


class _Deployment:
    """A `cluster.pools.controller_host.ServedDeployment` without HTTP."""

    def __init__(self, controller: Controller) -> None:
        self.control = controller
        self.model_name = "model"
        self.failed, self.recovered = controller.failed, controller.recovered
        self.drain, self.stop = controller.drain, controller.stop

    @property
    def url(self) -> str:
        return self.control.url

    async def start(self) -> None:
        await self.control.start()
        await self.control.until_in_view(5.0)


class _Platform:
    """A `cluster.pools.controller_host.Platform`."""

    id = "deployment"

    def __init__(self, schedule: Schedule, process: ControllerProcess) -> None:
        self._schedule, self._process = schedule, process
        self.endings = schedule.ray.endings.of(process)

    def deployment(self, config: TandemConfig, events: Events) -> _Deployment:
        return _Deployment(self._schedule.new_controller(self._process, config, events))

    async def exchange(self) -> ExchangeView | None:
        return None

    async def begin_exchange(self, old: TandemConfig, new: TandemConfig) -> str:
        raise Unavailable("not here")

    async def owner_ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    def restart(self) -> None:
        self._schedule.note(f"{self._process} ends itself")
        self._process.kill()

    async def end(self) -> None:
        await self._process.step()
        self._schedule.clear_away(self._process)


def _sent(order: Order[Any]) -> Callable[[ControllerHost], Coroutine[Any, Any, bytes]]:
    return lambda host: host.order(order.action, order.body())


class _Order:
    def __init__(self, text: str, changes: Callable[[ClusterState], bool] | None = None) -> None:
        self.text = text
        self.is_kept = changes  # whether the state has what was confirmed


class Schedule:
    def __init__(
        self, loop: VirtualLoop, rng: random.Random, outcome: Outcome, with_faults: bool, without: frozenset[str]
    ) -> None:
        self.loop, self.rng, self.outcome = loop, rng, outcome
        self.with_faults, self.without = with_faults, without
        self.on_message: OnMessage = lambda at, source, target, text: None
        self.ray = SimulatedRay(loop, self._drawn_for, self.note)
        self.ray.store.on_save = self._on_save
        self.ray.store.on_load = self._on_load
        self.ray.store.on_turn = self._on_turn
        self.ray.on_controller_end = self._on_controller_end
        self.ray.on_act = self._on_act
        self.ray.on_new = self._on_new
        self.has_ended = False
        self.newest = 0
        self.replaced: dict[ControllerProcess, float] = {}  # since when another one is in charge
        self.process: ControllerProcess | None = None  # the latest
        self.processes: list[ControllerProcess] = []
        self.host: ControllerHost | None = None
        self.blamed: dict[str, str] = {}  # processes that something was done to, by name
        self.orders: dict[_Order, None] = {}  # under way
        self.kept: ClusterState | None = None
        self.said: list[str] = []
        self.is_healed = False
        self.machines_made = 0
        self.hub_is_away = False
        self.well_since = 0.0  # since when the controller can record
        self.load = 0.0  # of the nodes' engines
        self._planned: Counter[str] = Counter()
        self._made: Counter[str] = Counter()  # processes, by their names
        self.config = self._first_config()

    def _drawn_for(self, name: str) -> random.Random:
        """Each part is drawn by itself, so that it stays the same when another one is left out."""
        return random.Random(f"control {self.outcome.seed} {name}")

    def _has(self, part: str) -> bool:
        """Whether the schedule has this part, which may be left out."""
        if part not in self.outcome.parts:
            self.outcome.parts.append(part)
        return part not in self.without

    def tell(self, source: object, target: object, text: str) -> None:
        for name in (str(source), str(target)):
            if name not in self.outcome.columns:
                self.outcome.columns.append(name)
        self.on_message(self.loop.time(), str(source), str(target), text)

    def note(self, text: str) -> None:
        self.outcome.history.append(f"{self.loop.time():8.3f} {text}")

    def broken(self, text: str) -> None:
        self.note(f"BROKEN: {text}")
        if not self.outcome.violations:
            self.outcome.violations.append(f"control plane: {text}")

    def _look(self) -> None:
        self._look_at_the_record()
        if self.outcome.violations:
            raise _Broken(self.outcome.violations.pop().removeprefix("control plane: "))

    def _look_at_the_record(self) -> None:
        """What an order was refused for may stand in the record; the next controller must not carry it out."""
        store, process, now = self.ray.store, self.process, self.loop.time()
        if process is None or not process.is_alive or process.is_stopped or not self.ray.is_well:
            self.well_since = now
        elif store.doubtful_since is not None and store.writer is process:
            doubtful_s = now - max(self.well_since, store.doubtful_since)
            if doubtful_s > MENDED_S:
                self.broken(f"a record that was not confirmed has stayed for {doubtful_s:.0f} s")

    # ── what there is ──

    def _first_config(self) -> TandemConfig:
        rng = self.rng
        self.has_places = rng.random() < 0.6
        for _ in range(rng.randint(1, 3) if self.has_places else 1):
            self._join(rng)
        decode = PoolConfig(nodes=rng.randint(1, 3))
        if rng.random() < 0.4:
            decode = replace(decode, min=1, max=4)
        elif self.has_places and rng.random() < 0.3:
            decode = PoolConfig(nodes=None)
        return TandemConfig(
            router=RouterConfig(
                tokenizer_path="model", model_name="fake", max_failovers=100 * GOOD, processes=rng.choice([1, 1, 2])
            ),
            scheduler=replace(TandemConfig().scheduler, max_num_seqs=100 * GOOD),
            pools=PoolsConfig(prefill=PoolConfig(nodes=rng.randint(0, 2)), decode=decode),
            rollout=RolloutConfig(surge=rng.choice([1, 1, 2]), settle_s=3.0),
            autoscaling=AutoscalingConfig(grow_after_s=4.0, shrink_after_s=10.0, settle_s=4.0),
            timeouts=TIMEOUTS,
        )

    def _join(self, rng: random.Random, room: int = 0) -> None:
        self.machines_made += 1
        number = self.machines_made
        slots = None
        if self.has_places:
            slots = {Role.PREFILL: room or rng.randint(1, 2), Role.DECODE: room or rng.randint(1, 3)}
        if number > 1 and not room and not self._has(f"m{number}"):
            return
        host = Host(f"m{number}", f"10.0.0.{number}", tuple(range(16)), slots=slots, head=number == 1)
        self.ray.machines.append(host)
        self.ray.change_machines()

    def new_controller(self, process: ControllerProcess, config: TandemConfig, events: Events) -> Controller:
        async def fix_model(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
            await process.step()
            await self.ray.delay(f"{process} asks the hub")
            if self.hub_is_away and not commit:
                raise Unavailable("the hub did not tell the current commit")
            if config.model.path.startswith(_NOT_ON_THE_HUB):
                raise ConfigurationError("the hub has no such model")
            await process.step()
            return config, commit or "1"

        return Controller(
            config,
            SimulatedHosts(self.ray, process),
            SimulatedLauncher(self.ray, process, config.timeouts.stop_s),
            self.ray.store.of(process),
            events,
            ControllerClock(process),
            fix_model,
        )

    def _start_controller(self) -> None:
        if not self.ray.head_is_there.is_set():  # Ray starts nothing without its control store
            self.loop.call_later(0.5, self._start_controller)
            return
        if self.has_ended or (self.process is not None and self.process.is_alive and not self.process.is_stopped):
            return
        self.newest += 1
        process = self.process = ControllerProcess(self.ray, self.newest)
        self.processes.append(process)
        self.note(f"{process} begins")
        rng = self._drawn_for(str(process))
        if self.with_faults and not self.is_healed and rng.random() < 0.3 and self._has(f"c{self.newest}"):
            process.fatal = rng.randint(1, 150)

        async def begin() -> None:
            self.host = ControllerHost(
                msgspec.msgpack.encode(self.config), _Platform(self, process), ControllerClock(process)
            )

        self.host = None
        process.run(begin())

    def _on_controller_end(self, process: ControllerProcess) -> None:
        if process is self.process and not process.is_last:
            again_s = self._drawn_for(f"the end of {process}").uniform(0.1, 3.0)
            self.loop.call_later(again_s, self._start_controller)

    def _on_new(self, actor: Actor) -> None:
        self._made[actor.name] += 1
        name = f"{actor.name}.{self._made[actor.name]}"
        rng = self._drawn_for(name)
        actor.start_s = rng.uniform(1.0, 8.0) if isinstance(actor, NodeActor) else rng.uniform(0.5, 3.0)
        actor.work_s = rng.choice([0.0, 0.5, 4.0, 15.0])
        setting = (
            actor.config.engine.scheduler.max_num_seqs if isinstance(actor, NodeActor) else actor.config.max_failovers
        )
        kind = setting // 100
        if kind == REFUSED_AT_START:
            actor.start_error = ConfigurationError("this setting cannot be")
        actor.dies_in_start = kind == DIES_IN_START
        if kind == DIES_LATER:
            actor.lives_s = rng.uniform(0.5, 2.5)
        if kind == ANSWERS_ERRORS and isinstance(actor, NodeActor):
            actor.finished = {"stop": 5, "error": 5}
        elif kind == ANSWERS_ERRORS and isinstance(actor, RouterActor):
            actor.replies, actor.errors = 10, 5
        elif isinstance(actor, NodeActor) and rng.random() < 0.5:
            # Clients ask for what no node can do.
            actor.client_errors = rng.randint(3, 9)
            actor.finished = {"stop": rng.randint(0, 20), "error": actor.client_errors}
        if isinstance(actor, NodeActor):
            actor.load = self.load
        if actor.machine in self.ray.cut:
            self.blamed[actor.name] = f"{actor.machine} is out of reach"
        if self.with_faults and not self.is_healed and rng.random() < 0.08 and self._has(name):
            self._blame(actor, "does not start")
            if rng.random() < 0.5:
                actor.start_error = Unavailable("not now")
            else:
                actor.dies_in_start = True

    def _blame(self, actor: Actor, what: str) -> None:
        self.note(f"{actor} {what}")
        self.blamed[actor.name] = what

    # ── what must hold at every step ──

    def _on_load(self, process: ControllerProcess, data: bytes | None) -> None:
        """A record whose answer was lost counts once another controller has read it, unless that one only learns that it was replaced."""
        if data is not None and process is not self.ray.store.writer and process not in self.replaced:
            self.kept = state.decode(data)

    def _on_turn(self, process: ControllerProcess, before: ControllerProcess | None, has_read: bool) -> None:
        """A controller takes over from another one by writing over the record that it read."""
        if not has_read:
            self.broken(f"{process} writes over what {before} recorded, and has not read it")
        if before is not None:
            self.replaced[before] = self.loop.time()
        self.replaced.pop(process, None)

    def _on_save(self, process: ControllerProcess, data: bytes) -> None:
        new, old = state.decode(data), self.kept
        self.kept = new
        if changed := _changed(old, new):
            self.tell(process, "record", changed)
        for decision in new.decisions:
            if decision.text not in self.said[-40:]:
                self.said.append(decision.text)
                self.note(f"{process}: {decision.text}")
        if old is None:
            return
        if new.last_number < old.last_number or any(
            new.next_index.get(role, 0) < index for role, index in old.next_index.items()
        ):
            self.broken("numbers that were given are given again")
        machines = {host.name for host in self.ray.machines}
        for record in old.nodes:
            now = new.find(record.node_id)
            is_gone = now is None or (now.leaving and now.info is None)
            if is_gone and not record.leaving and record.info is not None:
                placement, runs = record.placement, self.ray.actors.get(record.node_id)
                serves = runs is not None and runs.is_alive and runs.has_started and runs.silent_s == 0
                if isinstance(runs, NodeActor) and runs.info.epoch != record.info.epoch:
                    serves = False  # its new incarnation was announced to no one
                if serves and placement is not None and machines.issuperset(placement.hosts):
                    self.broken(f"{record.node_id} served, did not leave, and is forgotten")
            if now is not None and record.leaving and not now.leaving:
                self.broken(f"{record.node_id} was leaving, and is to stay again")
        if old.rollout is not None and new.rollout is None:
            for role in Role:
                if outdated := [record.node_id for record in new.outdated(role)]:
                    self.broken(f"a rollout is over, and {', '.join(outdated)} did not take part")
        if old.rollout is not None and new.rollout is not None:
            if old.rollout.going_back and not new.rollout.going_back and new.last_number == old.last_number:
                self.broken("a rollout that is taken back goes on")
            if old.sizes != new.sizes and not self.orders:
                self.broken(f"without an order the sizes become {_sizes(new)} during a rollout")
        if new.rollout is not None and new.rollout.going_back and not (old.rollout and old.rollout.going_back):
            self._check_reason(new.rollout.going_back)

    def _check_reason(self, why: str) -> None:
        """What is said to be wrong with the new nodes and routers is wrong with them."""
        if why == "as asked":
            if not any(order.text.startswith("go back") for order in self.orders):
                self.broken("a rollout is taken back as asked, and no one asked")
            return
        for name in re.findall(r"((?:prefill|decode|router)[-~\d.]*): (?:it is|\d+ of its)", why):
            bad = [actor for actor in self.ray.all if actor.name == name and _is_bad(actor)]
            if not bad and name not in self.blamed.keys() | self.ray.refused:
                self.broken(f"a rollout is taken back for a reason that is not true: {why}")

    def _on_act(self, process: ControllerProcess, what: str, actor: Actor) -> None:
        since = max(process.woke_at, self.replaced.get(process, self.loop.time()))
        if not process.is_stopped and self.loop.time() - since > UNDER_WAY_S:
            self.broken(f"{process} acts ({what} {actor}) although another controller has taken over")
        if what not in ("set members", "admit"):
            self.tell(process, actor.name, what)
        if what == "create" and isinstance(actor, NodeActor):
            self._check_room(actor)
        kept = self.kept
        if kept is None or self.ray.endings.value is not None:
            return
        record = kept.find(actor.name) if isinstance(actor, NodeActor) else kept.router(actor.name)
        if what in ("create", "drain", "leave", "change role") and record is None:
            self.broken(f"{process}: {what} {actor}, which is recorded nowhere")
        elif what in ("drain", "leave") and record is not None and not record.leaving:
            changes_role = isinstance(actor, NodeActor) and kept.known(actor.name).role is not actor.info.role
            if not changes_role and not any(order.text.startswith("down") for order in self.orders):
                evacuates = any(order.text.startswith("evacuate") for order in self.orders)
                if not (evacuates and isinstance(actor, RouterActor)):
                    self.broken(f"{process}: {what} {actor} before that was recorded")
        elif what == "kill" and record is not None and not record.leaving and actor.has_started:
            changes_role = isinstance(actor, NodeActor) and kept.known(actor.name).role is not actor.info.role
            if actor.silent_s == 0 and not changes_role and not _is_bad(actor) and not self.with_faults:
                self.broken(f"{process} kills {actor}, which serves")
        if isinstance(actor, RouterActor) and what == "set members":
            self.loop.call_soon(self._check_members, actor, process, [*actor.members])

    def _check_room(self, new: NodeActor) -> None:
        here = [
            actor
            for actor in self.ray.living()
            if isinstance(actor, NodeActor) and (actor.machine, actor.slot) == (new.machine, new.slot)
        ]
        for host in self.ray.machines:
            if host.name == new.machine and host.slots is not None and len(here) > host.slots.get(new.slot, 0):
                self.broken(f"{host.name} has no room for {', '.join(map(str, here))}")

    def _check_members(self, router: RouterActor, process: ControllerProcess, before: list[NodeInfo]) -> None:
        if router.members != before:
            names = ", ".join(info.node_id for info in router.members)
            self.tell(process, router.name, f"members: {names}")
        kept = self.kept
        if kept is None or self.with_faults or self.has_ended or self.ray.endings.value is not None:
            return
        unknown = [info.node_id for info in router.members if kept.find(info.node_id) is None]
        if unknown:
            self.broken(f"{router} is told of {', '.join(unknown)}, which is recorded nowhere")

    def _check_service(self) -> None:
        """Without faults there is always a router that has a node which decodes."""
        kept = self.kept
        if self.with_faults or kept is None or kept.evacuated or self.ray.endings.value is not None:
            return
        nodes = {
            actor.info.epoch
            for actor in self.ray.living()
            if isinstance(actor, NodeActor) and actor.info.role is Role.DECODE and not actor.is_drained
        }
        routers = [
            actor
            for actor in self.ray.living()
            if isinstance(actor, RouterActor) and actor.accepts and not actor.has_left
        ]
        if not any(info.epoch in nodes for router in routers for info in router.members):
            self.broken("no request can be answered, and nothing was broken")

    # ── orders ──

    async def _ordered(self, order: _Order, call: Callable[[ControllerHost], Coroutine[Any, Any, Any]]) -> bool:
        """Gives an order to the controller, as a command does. Returns whether it was confirmed."""
        process, host = self.process, self.host
        if process is None or host is None or not process.is_alive:
            return False
        self.outcome.requests += 1
        self.note(f"order: {order.text}")
        self.tell("operator", process, order.text)
        self.orders[order] = None
        before = (self.kept, process, len(self.orders), self.ray.store.lost_answers)
        working = process.run(call(host))
        working.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        try:
            await asyncio.wait({working, process.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() or working.cancelled():
                self.note(f"{order.text}: lost with {process}")
                return False
            try:
                working.result()
            except TandemError as error:
                name = type(error).__name__
                self.outcome.errors[name] = self.outcome.errors.get(name, 0) + 1
                self.note(f"{order.text}: {name}: {error}")
                self.tell(process, "operator", f"refused: {order.text}")
                self._check_refused(order, before)
                return False
            self.outcome.answered += 1
            self.note(f"{order.text}: done")
            self.tell(process, "operator", f"done: {order.text}")
            if order.is_kept is None or self.kept is None or len(self.orders) > 1:
                return True
            if not order.is_kept(self.kept) and self.kept.rollout is None:
                self.broken(f"{order.text} was confirmed, and is not kept")
            return True
        finally:
            del self.orders[order]

    def _check_refused(self, order: _Order, before: tuple[Any, ...]) -> None:
        kept, process, others, lost = before
        if kept is None or self.kept is None or others > 1 or len(self.orders) > 1:
            return
        if self.ray.store.lost_answers != lost or process is not self.process:
            return
        whole = order.text.startswith(("apply", "scale", "pause", "resume"))
        # A rollout that is taken back meanwhile has another revision again.
        numbers = (kept.revision.number, kept.last_number)
        if whole and kept.rollout is None and numbers != (self.kept.revision.number, self.kept.last_number):
            self.broken(f"{order.text} was refused, and there is another revision")
        if whole and not self._is_scaled and kept.sizes != self.kept.sizes:
            self.broken(f"{order.text} was refused, and the sizes become {_sizes(self.kept)}")

    async def _order(self, rng: random.Random) -> None:
        kept = self.kept
        if kept is None or self.has_ended:
            return
        names = [record.node_id for record in kept.nodes] or ["decode-0"]
        kind = rng.choice(
            ["scale", "scale", "role", "role", "drain", "apply", "apply", "apply", "back"] + ["pause"] * 2
        )
        if rng.random() < 0.1:
            kind = rng.choice(["reset", "evacuate", "resume"])
        if kind == "scale":
            await self._scale({rng.choice(ROLES): rng.randint(0, 4)})
        elif kind == "role":
            name, role = rng.choice(names), rng.choice(ROLES)
            await self._ordered(_Order(f"role {name} {role.value}"), _sent(ChangeRoleOrder(name, role)))
        elif kind == "drain":
            name, limit_s = rng.choice(names), rng.choice([1.0, 20.0])
            await self._ordered(_Order(f"drain {name}"), _sent(DrainOrder(name, limit_s)))
        elif kind == "apply":
            await self._apply(rng)
        elif kind == "back":
            await self._ordered(_Order("go back"), _sent(GoBackOrder()))
        elif kind == "pause":
            name = rng.choice([*names, "prefill", "decode"])
            await self._ordered(_Order(f"pause {name}", lambda kept: name in kept.paused), _sent(PauseOrder([name])))
        elif kind == "resume":
            await self._ordered(_Order("resume", lambda kept: not kept.paused), _sent(ResumeOrder()))
        elif kind == "reset":
            await self._ordered(_Order("reset"), _sent(ResetCacheOrder()))
        elif kind == "evacuate" and self.has_places:
            address = rng.choice(self.ray.machines).address
            await self._ordered(_Order(f"evacuate {address}"), _sent(EvacuateOrder(address, 20.0)))

    @property
    def _is_scaled(self) -> bool:
        return self.config.pools.decode.max is not None

    async def _scale(self, sizes: dict[Role, int]) -> bool:
        return await self._ordered(
            _Order(
                f"scale {', '.join(f'{role.value}={size}' for role, size in sizes.items())}",
                None if self._is_scaled else lambda kept: all(kept.sizes[role] == size for role, size in sizes.items()),
            ),
            _sent(ScaleOrder(sizes)),
        )

    async def _apply(self, rng: random.Random) -> None:
        config = self.config if self.kept is None else self.kept.revision.config or self.config
        number = 100 * rng.choice(KINDS) + rng.randrange(100)
        what = rng.choice(["nodes", "nodes", "routers", "both", "sizes", "at once", "model"])
        if what in ("nodes", "both"):
            config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=number))
        if what in ("routers", "both"):
            config = replace(config, router=replace(config.router, max_failovers=number))
        if what == "model":
            owner = rng.choice(["org/", "org/", _NOT_ON_THE_HUB])
            config = replace(config, model=replace(config.model, path=f"{owner}model-{number}"))
        if what == "sizes" or rng.random() < 0.3:
            pools = config.pools
            config = replace(config, pools=replace(pools, prefill=replace(pools.prefill, nodes=rng.randint(0, 3))))
        if what == "at once":
            config = replace(config, slo=replace(config.slo, ttft_s=rng.choice([1.0, 2.0, 3.0])))
        if self._is_scaled and rng.random() < 0.5:  # users come and go during a rollout, too
            self.loop.call_later(rng.uniform(0.0, 3.0), self._load, rng)
        if what in ("routers", "both") and self.with_faults and rng.random() < 0.4:
            self.loop.call_later(rng.uniform(0.0, 4.0), self._end_a_router, rng)
        await self._ordered(_Order(f"apply {what} {number}"), _sent(ApplyOrder(config)))

    # ── faults ──

    def _fault(self, rng: random.Random) -> None:
        if self.has_ended:
            return
        self.outcome.faults += 1
        lasts = rng.choice([0.5, 2.0, 6.0, 12.0, 25.0]) * rng.uniform(0.5, 1.5)
        kind = rng.choice(
            [
                "kill",
                "kill",
                "kill",
                "fatal",
                "fatal",
                "stop",
                "replaced",
                "die",
                "die",
                "hang",
                "late",
                "head",
                "full",
                "answers",
                "cut",
                "unseen",
                "machine",
                "join",
                "hub",
                "sigterm",
                "load",
                "load",
                "jump",
            ]
        )
        process, living = self.process, self.ray.living()
        running = process is not None and process.is_alive and not process.is_stopped
        if kind == "kill" and process is not None and running:
            self.note(f"{process} is killed")
            process.kill()
        elif kind == "fatal" and process is not None and running:
            process.fatal = process.steps + rng.randint(1, 60)
        elif kind == "stop" and process is not None and running:
            self.note(f"{process} is stopped for {lasts:.1f} s")
            process.stop()
            self.loop.call_later(lasts, self._go_on, process)
        elif kind == "replaced" and process is not None and running and lasts > 3.0:
            self.note(f"{process} is stopped for {lasts:.1f} s, and replaced")
            process.stop()
            self.loop.call_later(lasts, self._go_on, process)
            self.loop.call_later(rng.uniform(1.5, 3.0), self._start_controller)
        elif kind == "jump" and process is not None and running:
            self.note(f"the clock of {process} jumps {lasts:.1f} s ahead")
            process.jumped_s += lasts
            for actor in living:
                self.blamed[actor.name] = "a clock jumped"
        elif kind == "die" and living:
            actor = rng.choice(living)
            self._blame(actor, "dies")
            actor.end("killed")
        elif kind == "hang" and living:
            actor = rng.choice(living)
            self._blame(actor, f"hangs for {lasts:.1f} s")
            actor.hang()
            self.loop.call_later(lasts, actor.go_on)
        elif kind == "late":
            self._for(lasts, "calls are late", lambda: setattr(self.ray, "late", 0.3), self._in_time)
        elif kind == "head":
            self._for(lasts, "the control store is away", self.ray.head_is_there.clear, self.ray.head_is_there.set)
        elif kind == "full":
            self._for(lasts, "the store is full", lambda: self._full(True), lambda: self._full(False))
        elif kind == "answers":
            self._for(
                lasts, "the store's answers get lost", lambda: self._lose_answers(0.3), lambda: self._lose_answers(0.0)
            )
            # What an order was refused for then must not stay in the record.
            self.loop.call_later(lasts * rng.uniform(0.6, 1.0), self._begin, self._order, rng)
        elif kind == "cut":
            machine = rng.choice(self.ray.machines).name
            self._blame_machine(machine)
            self._for(
                lasts,
                f"{machine} is out of reach",
                lambda: self.ray.cut.add(machine),
                lambda: self.ray.cut.discard(machine),
            )
        elif kind == "unseen" and self.has_places:
            machine = rng.choice(self.ray.machines).name
            self._blame_machine(machine)
            self._for(lasts, f"{machine} is not seen", lambda: self._unsee(machine), lambda: self._see(machine))
        elif kind == "machine" and len(self.ray.machines) > 1:
            machine = rng.choice(self.ray.machines[1:]).name
            self._blame_machine(machine)
            self.note(f"{machine} is gone")
            self.ray.lose_machine(machine)
        elif kind == "join" and self.has_places and len(self.ray.machines) < 4:
            self._join(rng)
            self.note(f"{self.ray.machines[-1].name} joins")
        elif kind == "hub":
            self._for(lasts, "the hub is away", lambda: setattr(self, "hub_is_away", True), self._hub_is_back)
        elif kind == "sigterm":
            self._end_a_router(rng)
        elif kind == "load":
            self._load(rng)

    def _end_a_router(self, rng: random.Random) -> None:
        routers = [actor for actor in self.ray.living() if isinstance(actor, RouterActor)]
        if not routers or self.has_ended:
            return
        router = rng.choice(routers)
        self._blame(router, "gets SIGTERM")
        router.is_ending = True
        self.loop.call_later(rng.choice([1.0, 20.0]), router.end, "it ended after SIGTERM")

    def _load(self, rng: random.Random) -> None:
        self._set_load(rng.choice([0.0, 0.05, 0.95]))
        self.note(f"the load is {self.load}")

    def _set_load(self, load: float) -> None:
        self.load = load
        for actor in self.ray.living():
            if isinstance(actor, NodeActor):
                actor.load = load

    def _for(self, lasts: float, what: str, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        self.note(f"{what} for {lasts:.1f} s")
        begin()
        self.loop.call_later(lasts, end)

    def _full(self, is_full: bool) -> None:
        self.ray.store.is_full = is_full

    def _lose_answers(self, chance: float) -> None:
        self.ray.store.loses_answers = chance

    def _in_time(self) -> None:
        self.ray.late = 0.0

    def _hub_is_back(self) -> None:
        self.hub_is_away = False

    def _unsee(self, machine: str) -> None:
        self.ray.unseen.add(machine)
        self.ray.change_machines()

    def _see(self, machine: str) -> None:
        self.ray.unseen.discard(machine)
        self.ray.change_machines()

    def _blame_machine(self, machine: str) -> None:
        for actor in self.ray.living():
            if actor.machine == machine:
                self.blamed[actor.name] = f"{machine} had a fault"

    def _go_on(self, process: ControllerProcess) -> None:
        if process.is_alive and process.is_stopped:
            self.note(f"{process} goes on")
            process.go_on()

    def _heal(self) -> None:
        self.note("everything heals")
        self.is_healed = True
        self._full(False)
        self._lose_answers(0.0)
        self._in_time()
        self._hub_is_back()
        self.ray.head_is_there.set()
        self.ray.cut.clear()
        self.ray.unseen.clear()
        self.ray.change_machines()
        if self.has_places:
            self._join(self.rng, room=6)  # what no machine had room for finds it
        for actor in self.ray.living():
            actor.go_on()
        self._set_load(0.3)
        for process in self.processes:
            process.fatal = None
            self._go_on(process)

    # ── the course ──

    async def run(self) -> None:
        rng = self.rng
        self._start_controller()
        await asyncio.sleep(rng.choice([1.0, 12.0, 12.0, 12.0]))
        end = self.loop.time() + FAULTS_S
        for _ in range(rng.choice([1, 3, 6, 10])):
            self._plan(rng.uniform(0.0, FAULTS_S), "o", self._order)
        if rng.random() < 0.5:  # many at once, in the middle of a rollout
            at = rng.uniform(0.0, FAULTS_S / 2)
            self._plan(at, "o", self._apply)
            for _ in range(rng.randint(1, 4)):
                self._plan(at + rng.expovariate(0.1), "o", self._order)
        if self.with_faults:
            for _ in range(rng.randint(1, 10)):
                self._plan(rng.uniform(0.0, FAULTS_S), "f", self._fault)
        else:
            self._plan(rng.uniform(0.0, FAULTS_S), "f", self._load)
        ends = rng.random() < 0.12 and self._has(DOWN)
        if ends:
            self.loop.call_later(rng.uniform(0.3, 1.0) * FAULTS_S, lambda: self.loop.create_task(self._down()))
        served = False
        while self.loop.time() < end:
            await asyncio.sleep(1.0)
            self._look()
            served = served or any(isinstance(actor, RouterActor) and actor.accepts for actor in self.ray.living())
            if served and self.loop.time() > 30.0:
                self._check_service()
        self._heal()
        if ends:
            await self._until(
                lambda: self.has_ended or bool(self.host and self.host._stage is ClusterStage.STOPPED), "the end"
            )
            if left := [str(actor) for actor in self.ray.living()]:
                raise _Broken(f"the deployment has ended, and {', '.join(left)} runs")
        else:
            await self._until(self._is_quiet, "quiet")
        self.outcome.steps = self.process.steps if self.process is not None else 0

    def _plan(self, at: float, kind: str, do: Callable[[random.Random], Any]) -> None:
        """Has an order or a fault happen `at` seconds from now, if it is not left out."""
        self._planned[kind] += 1
        name = f"{kind}{self._planned[kind]}"
        if self._has(name):
            self.loop.call_later(at, self._begin, do, self._drawn_for(name))

    def _begin(self, do: Callable[[random.Random], Any], rng: random.Random) -> None:
        if asyncio.iscoroutine(work := do(rng)):
            self.loop.create_task(work)

    async def _down(self) -> None:
        """As the command: the controller ends what it knows, then the command ends the controller and what is left."""
        ended, process = (await self._ordered(_Order("down"), lambda host: host.end("tandem down")), self.process)
        if ended and process is not None and self.ray.head_is_there.is_set():
            self.clear_away(process)
        if not self.has_ended:
            self.loop.call_later(1.0, lambda: self.loop.create_task(self._down()))

    def clear_away(self, process: ControllerProcess) -> None:
        self.has_ended = process.is_last = True
        process.kill()
        self.ray.store.value = None
        for actor in self.ray.living():
            actor.end("its deployment has ended")

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        until = self.loop.time() + QUIET_S
        retried = self.loop.time()
        while not is_so():
            await asyncio.sleep(1.0)
            self._look()
            if self.loop.time() - retried > 20.0 and self.kept is not None and not self.has_ended:
                retried = self.loop.time()
                await self._retry()
            if self.loop.time() > until:
                raise _Broken(f"no {what} {QUIET_S:.0f} s after all faults: {self._left()}")

    async def _retry(self) -> None:
        """An operator has what was left out started again."""
        kept = self.kept
        if kept is not None and not self.orders:
            sizes = {role: size for role in ROLES if (size := kept.sizes[role]) is not None}
            await self._scale(sizes)

    def _is_quiet(self) -> bool:
        return not self._left()

    def _left(self) -> str:
        """What is not as it was ordered."""
        kept, host = self.kept, self.host
        if kept is None or host is None or self.process is None or not self.process.is_alive:
            return "there is no controller"
        if self.ray.store.value is None or state.decode(self.ray.store.value) != kept:
            return "what is kept is not what the controller knows"
        if self.orders:
            return f"orders: {', '.join(order.text for order in self.orders)}"
        if host._stage is not ClusterStage.SERVING:
            return f"the controller is {host._stage.value}: {host._failure}"
        waits = cast("Controller", host._deployment.control).pools.rollout_waits
        if kept.rollout is not None:
            # With fewer places than nodes an old one keeps its place, unless `rollout.max_unavailable` says otherwise.
            if kept.evacuated and "no machine has room" in waits:
                return ""
            return f"a rollout goes on ({kept.rollout.going_back or waits})"
        if leaving := [record.node_id for record in kept.nodes if record.leaving]:
            return f"{', '.join(leaving)} should have left"
        return self._wrong_nodes(kept) or self._wrong_routers(kept)

    def _wrong_nodes(self, kept: ClusterState) -> str:
        config = kept.revision.config or self.config
        for role in ROLES:
            staying, wanted = (kept.staying(role), plan.wanted_size(kept, self.ray.machines, role, config.pools))
            if len(staying) != wanted:
                return f"{role.value} has {len(staying)} nodes, and should have {wanted}"
        if waiting := [record.node_id for record in kept.nodes if record.placement is None]:
            return f"{', '.join(waiting)}: waits for a machine, and there is room"
        if +Counter(self.ray.wanted) != +Counter(plan.needed_slots(kept, config.pools)):
            return f"machines are asked for {self.ray.wanted}"
        nodes = [actor for actor in self.ray.living() if isinstance(actor, NodeActor)]
        for host in self.ray.machines:
            here = [actor for actor in nodes if actor.machine == host.name]
            cores = [core for actor in here for core in actor.config.cores]
            if host.slots is not None and len(cores) != len(set(cores)):
                return f"nodes on {host.name} share cores although there are enough: {cores}"
        placed = {record.node_id: record for record in kept.nodes if record.placement is not None}
        counts = Counter(actor.name for actor in nodes)
        if counts != Counter(list(placed)):
            return f"{sorted(counts.elements())} run, and {sorted(placed)} are recorded"
        for actor in nodes:
            record = placed[actor.name]
            assert record.placement is not None
            right = (record.role, record.placement.host, config.scheduler.max_num_seqs, actor.info)
            there = (
                actor.config.role,
                actor.machine,
                actor.config.engine.scheduler.max_num_seqs,
                # A node whose record could not be written serves all the same.
                replace(record.info, start_s=0.0) if record.info is not None else actor.info,
            )
            if right != there or actor.state.value != "ready":
                return f"{actor} is {there}, {actor.state.value}, and should be {right}"
        return ""

    def _wrong_routers(self, kept: ClusterState) -> str:
        config = kept.revision.config or self.config
        routers = [actor for actor in self.ray.living() if isinstance(actor, RouterActor)]
        if sorted(router.name for router in routers) != sorted(record.name for record in kept.routers):
            return f"routers {[str(router) for router in routers]}, and recorded are {[r.name for r in kept.routers]}"
        if len(routers) != config.router.processes:
            return f"{len(routers)} routers, and {config.router.processes} are wanted"
        infos = {actor.info for actor in self.ray.living() if isinstance(actor, NodeActor)}
        for router in routers:
            if router.config.max_failovers != config.router.max_failovers:
                return f"{router} has another configuration"
            if {replace(info, start_s=0.0) for info in router.members} != infos:
                return f"{router} knows {sorted(i.node_id for i in router.members)}, and there are {sorted(i.node_id for i in infos)}"
            if sorted(router.paused) != sorted(kept.paused):
                return f"{router} knows the pauses {router.paused}, and there are {kept.paused}"
            if not router.accepts or router.is_ending:
                return f"{router} accepts nothing"
        return ""


def _is_bad(actor: Actor) -> bool:
    if isinstance(actor, NodeActor):
        errors = actor.finished.get("error", 0) - actor.client_errors
        return errors > 0 or actor.config.engine.scheduler.max_num_seqs // 100 != GOOD
    return bool(actor.config.max_failovers // 100 != GOOD)


def _sizes(kept: ClusterState) -> str:
    return ", ".join(f"{role.value}={size}" for role, size in kept.sizes.items() if size)


def _changed(old: ClusterState | None, new: ClusterState) -> str:
    """What a record says that the one before it did not, in a few words."""
    if old is None:
        return "the first"
    before = {record.node_id: record for record in old.nodes}
    now = {record.node_id: record for record in new.nodes}
    words = [f"-{name}" for name in before if name not in now]
    for name, record in now.items():
        was = before.get(name)
        if was is None:
            words.append(f"+{name}")
        elif record != was:
            facts = (
                ("leaves", record.leaving and not was.leaving),
                ("left out", bool(record.left_out) and not was.left_out),
                (f"becomes {record.role.value}", record.role is not was.role),
                ("placed", record.placement != was.placement),
                ("serves", record.info is not None and record.info != was.info),
            )
            words += [f"{name} {fact}" for fact, is_so in facts if is_so]
    known = [(record.name, record.leaving) for record in old.routers]
    for router in new.routers:
        if (router.name, router.leaving) not in known:
            words.append(f"{router.name} leaves" if router.leaving else f"+{router.name}")
    words += [f"-{name}" for name, _ in known if new.router(name) is None]
    if old.sizes != new.sizes:
        words.append(f"sizes {_sizes(new)}")
    if old.paused != new.paused:
        words.append(f"paused {', '.join(new.paused) or 'nothing'}")
    if old.rollout != new.rollout:
        back = new.rollout is not None and new.rollout.going_back
        words.append("rollout over" if new.rollout is None else "goes back" if back else "rollout")
    return ", ".join(words)
