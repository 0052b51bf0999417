"""Ray as a controller uses it, on the virtual clock: machines, a control store, named processes, and calls that come late or never.

A controller is one process of many tasks. Each of its effects is a step, and it may be killed before and after any, or be stopped and go
on later. What it has started lives on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tandem.base.errors import ConfigurationError, NodeLost, TandemError, Unavailable
from tandem.base.logs import LogPage, LogPosition, RecentLines
from tandem.base.progress import Report
from tandem.cluster.launcher import CheckKept, Confirm, Host, Needs, TakenPlace
from tandem.cluster.pools.room import needed_by
from tandem.cluster.pools.state import ClusterState, decode
from tandem.cluster.tasks import Clock
from tandem.node.config import NodeConfig
from tandem.router.config import RouterConfig
from tandem.simulator.clock import VirtualLoop
from tandem.wire.forecasts import ForecastScore, MeasuredRequest
from tandem.wire.nodes import NodeInfo, NodeSighting, NodeState, PoolReport, Role, RouterInfo, RouterQueue
from tandem.wire.requests import NodeCounters, NodeStatus
from tests.cluster.pools.helpers import endpoint_of, node_info

T = TypeVar("T")

_OWNER: contextvars.ContextVar[ControllerProcess | None] = contextvars.ContextVar("owner", default=None)
_ADOPT_S, _NAME_S, _REACH_AGAIN_S = 5.0, 10.0, 0.5  # as `cluster.on_ray.handles` waits
SILENT_S = 1e6


def new_task(loop: asyncio.AbstractEventLoop, work: Any, **given: Any) -> asyncio.Task[Any]:
    """The loop's task factory: a controller's tasks end with its process."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **given)
    context = given.get("context") or contextvars.copy_context()
    if (owner := context.get(_OWNER)) is not None:
        owner.adopt(task)
    return task


def outside(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Runs work that belongs to no controller, even if one asked for it."""
    context = contextvars.copy_context()
    context.run(_OWNER.set, None)
    return loop.create_task(work, context=context)


class ControllerProcess:
    def __init__(self, ray: SimulatedRay, number: int) -> None:
        self.ray, self.number = ray, number
        self.is_alive = True
        self.is_last = False  # the platform starts no other in its place
        self.fatal: int | None = None  # the step at which it is killed
        self.steps = 0
        self.jumped_s = 0.0  # how far its clock is ahead
        self.loaded: bytes | None = None  # the record that it read
        self.woke_at = 0.0  # when it last went on after it was stopped
        self.ended = ray.loop.create_future()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._going = asyncio.Event()
        self._going.set()

    def __str__(self) -> str:
        return f"controller {self.number}"

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        if not self.is_alive:
            task.cancel()

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        context = contextvars.copy_context()
        context.run(_OWNER.set, self)
        return self.ray.loop.create_task(work, context=context)

    async def step(self) -> None:
        self.steps += 1
        if self.fatal is not None and self.steps >= self.fatal and self.is_alive:
            self.ray.note(f"{self} dies at step {self.steps}")
            self.kill()
        await self.runs()

    async def runs(self) -> None:
        """Returns when the process runs; never in one that has ended."""
        if not self._going.is_set():
            await self._going.wait()
        if not self.is_alive:
            raise asyncio.CancelledError

    @property
    def is_stopped(self) -> bool:
        return not self._going.is_set()

    def stop(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self.woke_at = self.ray.loop.time()
        self._going.set()

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._going.set()
        for task in list(self._tasks):
            task.cancel()
        if not self.ended.done():
            self.ended.set_result(None)
        self.ray.on_controller_end(self)


class ControllerClock(Clock):
    def __init__(self, process: ControllerProcess) -> None:
        self._process = process

    def now(self) -> float:
        return self._process.ray.loop.time() + self._process.jumped_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._process.runs()


class SimulatedRay:
    """The machines, the control store, and every process that was ever started."""

    def __init__(
        self, loop: VirtualLoop, drawn_for: Callable[[str], random.Random], note: Callable[[str], None]
    ) -> None:
        self.loop, self.note = loop, note
        self._drawn_for, self._calls = drawn_for, dict[str, random.Random]()
        self.machines: list[Host] = []
        self.unseen: set[str] = set()  # machines that Ray does not see, though they run
        self.cut: set[str] = set()  # machines that the controller cannot reach, though Ray does
        self.actors: dict[str, Actor] = {}  # by name, as Ray knows them
        self.all: list[Actor] = []
        self.refused: set[str] = set()  # processes for which there was no machine
        self.late = 0.0  # the chance that a call takes seconds
        self.head_is_there = asyncio.Event()
        self.head_is_there.set()
        self.machines_changed = asyncio.Event()
        self.numbers = itertools.count(1)
        self.wanted: dict[Role, int] = {}  # the places that an autoscaler of machines is asked for
        self._late_calls = 0  # that have begun, also those whose reason is over
        self.store = KeptState(self)
        self.endings = KeptState(self)
        self.on_controller_end: Callable[[ControllerProcess], None] = lambda process: None
        self.on_act: Callable[[ControllerProcess, str, Actor], None] = lambda process, what, actor: None
        self.on_new: Callable[[Actor], None] = lambda actor: None

    # ── what is there ──

    def living(self) -> list[Actor]:
        return [actor for actor in self.all if actor.is_alive]

    @property
    def is_well(self) -> bool:
        """Whether the control store takes records, and in time."""
        store = self.store
        takes = not (store.is_full or store.loses_answers)
        return self.head_is_there.is_set() and takes and not (self.late or self._late_calls)

    def is_seen(self, machine: str) -> bool:
        return machine not in self.unseen and any(host.name == machine for host in self.machines)

    def change_machines(self) -> None:
        self.machines_changed.set()
        self.machines_changed = asyncio.Event()
        for actor in self.living():
            if actor.is_doomed and self.is_seen(actor.machine):
                actor.end("Ray ended it")

    def lose_machine(self, name: str) -> None:
        self.machines = [host for host in self.machines if host.name != name]
        for actor in self.living():
            if actor.machine == name:
                actor.end("its machine is gone")
        self.change_machines()

    def end(self, process: ControllerProcess, actor: Actor) -> None:
        if actor.is_alive:
            self.on_act(process, "kill", actor)
        if self.is_seen(actor.machine):
            actor.end("killed")
        else:
            actor.is_doomed = True

    # ── calls ──

    def calls(self, caller: str) -> random.Random:
        """What is drawn for one caller's calls stays the same when another one calls less often."""
        if caller not in self._calls:
            self._calls[caller] = self._drawn_for(caller)
        return self._calls[caller]

    async def delay(self, caller: str) -> None:
        rng = self.calls(caller)
        slow = rng.random() < self.late
        self._late_calls += slow
        try:
            await asyncio.sleep(rng.uniform(0.5, 6.0) if slow else rng.uniform(0.0005, 0.01))
        finally:
            self._late_calls -= slow

    async def control_store(self, process: ControllerProcess, what: str) -> None:
        await process.step()
        await self.delay(f"{process} {what}")
        await self.head_is_there.wait()
        await process.step()


class KeptState:
    """A value in Ray's control store. Writes are whole; the answer to one may be lost."""

    def __init__(self, ray: SimulatedRay) -> None:
        self._ray = ray
        self.value: bytes | None = None
        self.is_full = False
        self.loses_answers = 0.0
        self.lost_answers = 0
        self.doubtful_since: float | None = None  # since when the latest record is one whose answer was lost
        self.on_save: Callable[[ControllerProcess, bytes], None] = lambda process, state: None
        self.on_turn: Callable[[ControllerProcess, ControllerProcess | None, bool], None] = (
            lambda process, before, has_read: None
        )
        self.writer: ControllerProcess | None = None
        self.on_load: Callable[[ControllerProcess, bytes | None], None] = lambda process, state: None

    def take_turn(self, process: ControllerProcess) -> None:
        if process is not self.writer:
            self.on_turn(process, self.writer, self.value == process.loaded)
            self.writer = process

    def of(self, process: ControllerProcess) -> KeptStateOf:
        return KeptStateOf(self, self._ray, process)


class KeptStateOf:
    """A `cluster.launcher.StateStore`, as one controller uses it."""

    def __init__(self, kept: KeptState, ray: SimulatedRay, process: ControllerProcess) -> None:
        self._kept, self._ray, self._process = kept, ray, process

    async def load(self) -> bytes | None:
        await self._ray.control_store(self._process, "reads")
        self._kept.on_load(self._process, self._kept.value)
        self._process.loaded = self._kept.value
        return self._kept.value

    async def save(self, state: bytes, check: CheckKept | None = None) -> None:
        await self._ray.control_store(self._process, "records")
        if check is not None:
            check(self._kept.value)
        if self._kept.is_full:
            raise Unavailable("no space left on device")
        self._kept.take_turn(self._process)
        says_more = self._kept.value is None or _said(self._kept.value) != _said(state)
        self._kept.value = state
        if self._ray.calls(f"{self._process} hears").random() < self._kept.loses_answers:
            self._kept.lost_answers += 1
            if says_more:
                self._kept.doubtful_since = self._kept.doubtful_since or self._ray.loop.time()
            raise Unavailable("Ray's control store did not answer in time")
        self._kept.doubtful_since = None
        self._kept.on_save(self._process, state)
        await self._process.step()


def _said(record: bytes) -> ClusterState:
    """A controller that takes over first records what it read under its own name: that takes nothing back."""
    return msgspec.structs.replace(decode(record), writer="")


class SimulatedHosts:
    """A `cluster.launcher.Hosts`."""

    def __init__(self, ray: SimulatedRay, process: ControllerProcess) -> None:
        self._ray, self._process = ray, process
        self.needs: Needs = {}

    async def present(self) -> list[Host]:
        await self._process.step()
        await self._ray.delay(f"{self._process} looks")
        await self._process.runs()
        if not self._ray.head_is_there.is_set():
            raise Unavailable("Ray's control store does not answer")
        return [host for host in self._ray.machines if host.name not in self._ray.unseen]

    async def changed(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ray.machines_changed.wait(), timeout_s)
        await self._process.runs()

    def placing(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def use(self, needs: Needs, taken: Sequence[TakenPlace]) -> None:
        self.needs = needs
        assert all(place.needed == needed_by(place.slot, needs) for place in taken)

    async def want(self, slots: dict[Role, int]) -> None:
        await self._process.step()
        self._ray.wanted = slots


class SimulatedLauncher:
    """A `cluster.launcher.Launcher` whose handles find, create and end processes as Ray's do."""

    def __init__(self, ray: SimulatedRay, process: ControllerProcess, stop_s: float) -> None:
        self._ray, self._process, self._stop_s = ray, process, stop_s

    def launch_node(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        confirm: Confirm,
        beside: Sequence[Host] = (),
    ) -> NodeHandleOf:
        def create() -> NodeActor:
            return NodeActor(self._ray, config, host.name, slot)

        def is_wanted(running: Actor) -> bool:
            return _without_role(running.config) == _without_role(config)

        return NodeHandleOf(
            self._ray, self._process, config.node_id, host.name, is_wanted, create, confirm, self._stop_s
        )

    def launch_router(
        self, name: str, config: RouterConfig, host: Host | None, confirm: Confirm, door: str = ""
    ) -> RouterHandleOf:
        machine = self._ray.machines[0].name if host is None else host.name

        def create() -> RouterActor:
            return RouterActor(self._ray, name, config, machine)

        def is_wanted(running: Actor) -> bool:
            return bool(running.config == config)

        handle = RouterHandleOf(self._ray, self._process, name, machine, is_wanted, create, confirm, self._stop_s)
        handle.door = door
        return handle

    async def end(self, name: str) -> None:
        await self._ray.control_store(self._process, f"ends {name}")
        if (running := self._ray.actors.get(name)) is not None:
            self._ray.end(self._process, running)
        await self._process.step()


def _without_role(config: Any) -> Any:
    return msgspec.structs.replace(config, role=Role.AGGREGATED, transfer=None)


# ── processes ──


class Actor:
    """A process that Ray runs under a name."""

    def __init__(self, ray: SimulatedRay, name: str, config: Any, machine: str) -> None:
        self.ray, self.name, self.config, self.machine = ray, name, config, machine
        self.number = next(ray.numbers)
        self.info: Any = None  # as it announces itself
        self.is_alive = True
        self.is_doomed = False  # Ray has ended it, on a machine that it does not see
        self.start_s = 1.0
        self.start_error: TandemError | None = None
        self.dies_in_start = False
        self.lives_s: float | None = None  # after its start, until it dies by itself
        self.ended: asyncio.Future[str] = ray.loop.create_future()
        self.answers = asyncio.Event()
        self.answers.set()
        self.silent_since: float | None = None
        self.started: asyncio.Task[Any] | None = None
        self.has_started = False
        self.reports: list[Report] = []
        self.log = RecentLines()
        self.work_s = 0.0  # how long its requests still take when it is drained
        ray.all.append(self)
        ray.actors[name] = self
        ray.on_new(self)

    def __str__(self) -> str:
        return f"{self.name} ({self.number})"

    def end(self, why: str) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.silent_since = self.silent_since or self.ray.loop.time()
        self.ray.note(f"{self} has ended: {why}")
        self.ended.set_result(why)
        self.answers.set()

    def hang(self) -> None:
        self.silent_since = self.ray.loop.time()
        self.answers.clear()

    def go_on(self) -> None:
        if self.is_alive:
            self.silent_since = None
        self.answers.set()

    @property
    def silent_s(self) -> float:
        return 0.0 if self.silent_since is None else self.ray.loop.time() - self.silent_since

    async def start(self, report: Report, *given: Any) -> Any:
        """A second call waits for the first one's result; after a failure it tries again."""
        self.reports.append(report)
        if self.started is None:
            self.started = outside(self.ray.loop, self._start(*given))
            self.started.add_done_callback(self._on_started)
        await asyncio.shield(self.started)
        return self.info  # as it is now: its role may have changed since

    def _on_started(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.started = None

    async def _start(self, *given: Any) -> None:
        for part in range(4):
            for report in self.reports:
                report("loading the weights", part / 4)
            await asyncio.sleep(self.start_s / 4)
            await self.answers.wait()
        if self.dies_in_start:
            self.end("killed by the kernel")
        if not self.is_alive:
            raise NodeLost(f"{self.name} has ended")
        if self.start_error is not None:
            raise self.start_error
        self.begin(*given)
        self.has_started = True
        if self.lives_s is not None:
            self.ray.loop.call_later(self.lives_s, self.end, "it died of its configuration")

    def begin(self, *given: Any) -> None:
        """Takes what it needs to serve, or raises."""

    async def drain(self, timeout_s: float) -> bool:
        left_s = self.work_s
        await asyncio.sleep(min(left_s, timeout_s))
        await self.answers.wait()
        return left_s <= timeout_s and self.is_alive


class NodeActor(Actor):
    def __init__(self, ray: SimulatedRay, config: NodeConfig, machine: str, slot: Role) -> None:
        self.slot = slot
        self.state = NodeState.STARTING
        self.finished: dict[str, int] = {}
        self.client_errors = 0
        self.load = 0.0  # of its engine, 0 to 1
        self.is_drained = False
        self.admitted: list[str] = []
        self.adapters: dict[str, str] = {}
        self.steps = self.tokens = 0
        super().__init__(ray, config.node_id, config, machine)
        self._new_epoch()

    def _new_epoch(self) -> None:
        self.info = node_info(self.config, next(self.ray.numbers))

    def begin(self, *given: Any) -> None:
        self.state = NodeState.READY

    def status(self) -> NodeStatus:
        self.steps += 20
        self.tokens += int(400 * self.load)
        return NodeStatus(
            node_id=self.name,
            role=self.info.role,
            epoch=self.info.epoch,
            state=self.state,
            free_blocks=int(100 * (1 - self.load)),
            total_blocks=100,
            running=0,
            waiting=int(8 * self.load),
            waiting_tokens=0,
            transfers=0,
            held_blocks=0,
            step_age_s=0.0,
            counters=NodeCounters(
                requests_finished=dict(self.finished),
                client_errors=self.client_errors,
                steps=self.steps,
                step_seconds=self.steps * 0.05 * self.load,
                output_tokens=self.tokens,
            ),
            oldest_wait_s=10.0 * max(0.0, self.load - 0.7),
        )

    async def drain(self, timeout_s: float) -> bool:
        self.state = NodeState.DRAINING
        self.is_drained = await super().drain(timeout_s)
        return self.is_drained

    async def change_role(self, config: NodeConfig) -> NodeInfo:
        if not self.is_drained:
            raise Unavailable("it still has work")
        await asyncio.sleep(self.start_s / 4)
        self.config, self.state, self.is_drained = config, NodeState.READY, False
        self._new_epoch()
        return self.info


class RouterActor(Actor):
    def __init__(self, ray: SimulatedRay, name: str, config: RouterConfig, machine: str) -> None:
        self.members: list[NodeInfo] = []
        self.paused: list[str] = []
        self.accepts = False
        self.is_ending = False
        self.has_left = False
        self.replies = self.errors = 0
        super().__init__(ray, name, config, machine)
        self.info = RouterInfo(
            f"http://{config.host}:{config.port}",
            endpoint_of(name, self.number),
            f"door {self.number}",
            f"desk {self.number}",
        )

    def begin(self, door: str = "") -> None:
        others = [
            other
            for other in self.ray.living()
            if isinstance(other, RouterActor)
            and other is not self
            and other.machine == self.machine
            and other.config.port == self.config.port
            and other.has_started
        ]
        if others and door not in [other.info.door for other in others]:
            raise ConfigurationError(f"router.port: cannot listen on {self.config.port}: Address already in use")

    def set_members(self, members: list[NodeInfo], paused: Sequence[str]) -> RouterQueue:
        self.members, self.paused, self.accepts = members, list(paused), not self.has_left
        return RouterQueue(accepts=self.accepts, is_ending=self.is_ending, answers=self.replies, errors=self.errors)

    def sightings(self) -> list[NodeSighting]:
        return [self._sighting(info) for info in self.members]

    def _sighting(self, info: NodeInfo) -> NodeSighting:
        nodes = [actor for actor in self.ray.all if isinstance(actor, NodeActor) and actor.info.epoch == info.epoch]
        silent_s = nodes[0].silent_s if nodes else SILENT_S
        state = nodes[0].state if nodes else None
        return NodeSighting(info.node_id, info.epoch, silent_s, state, 0.0)

    async def leave(self, timeout_s: float) -> bool:
        self.has_left, self.accepts = True, False
        return await super().drain(timeout_s)


# ── handles ──


class _Unreachable(Unavailable):
    """As `cluster.on_ray.errors.ProcessUnreachable`."""


class HandleOf:
    """A process under a name, as one controller handles it: it is found or created in the background."""

    def __init__(
        self,
        ray: SimulatedRay,
        process: ControllerProcess,
        name: str,
        machine: str,
        is_wanted: Callable[[Actor], bool],
        create: Callable[[], Actor],
        confirm: Confirm,
        stop_s: float,
    ) -> None:
        self.ray, self.process, self.name, self.machine = ray, process, name, machine
        self._is_wanted, self._create, self._confirm, self._stop_s = is_wanted, create, confirm, stop_s
        self._caller = f"{process} {name}"
        self._serves = False
        self._actor = asyncio.ensure_future(self._find_or_create())

    async def _find_or_create(self) -> Actor:
        await self.ray.control_store(self.process, self.name)
        running = self.ray.actors.get(self.name)
        if running is not None and running.is_alive and not running.is_doomed:
            try:
                if await self._until_reached(running, lambda: _result(self._is_wanted(running)), _ADOPT_S):
                    self.ray.note(f"{self.process} adopts {running}")
                    return running
            except (TandemError, TimeoutError):
                pass
            await self._confirm()
            await self._kill(running)
        await self._confirm()
        if not self.ray.is_seen(self.machine):
            self.ray.refused.add(self.name)
            raise Unavailable("no machine of the Ray cluster has room for this process")
        named = self.ray.actors.get(self.name)
        if named is not None and named.is_alive and not named.is_doomed:  # of another controller
            raise Unavailable(f"Ray did not free the name {self.name}")
        actor = self._create()
        self.ray.note(f"{self.process} starts {actor} on {actor.machine}")
        self.ray.on_act(self.process, "create", actor)
        await self.process.step()
        return actor

    async def _until_reached(self, actor: Actor, work: Callable[[], Awaitable[T]], answer_s: float | None = None) -> T:
        while True:
            try:
                return await asyncio.wait_for(self.call(actor, work), answer_s)
            except _Unreachable:
                await asyncio.sleep(_REACH_AGAIN_S)

    async def _kill(self, actor: Actor) -> None:
        await self.ray.control_store(self.process, self.name)
        self.ray.end(self.process, actor)
        await self.process.step()

    async def call(self, actor: Actor, work: Callable[[], Awaitable[T]]) -> T:
        """The work goes on in the process if the caller gives up."""
        await self.process.step()
        await self.ray.delay(self._caller)
        await actor.answers.wait()
        if actor.machine in self.ray.cut:
            await asyncio.sleep(1.0)
            raise _Unreachable(f"{self.name} cannot be reached")
        if not actor.is_alive:
            await self._until_seen(actor)
            raise NodeLost(f"{self.name} has ended: {actor.ended.result()}")

        async def there() -> T:
            return await work()

        working = outside(self.ray.loop, there())
        working.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        await asyncio.wait({working, actor.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await self._until_seen(actor)
            raise NodeLost(f"{self.name} has ended: {actor.ended.result()}")
        await self.ray.delay(self._caller)
        await actor.answers.wait()
        await self.process.step()
        return working.result()

    async def _until_seen(self, actor: Actor) -> None:
        """Without its machine a process's end proves nothing."""
        while not self.ray.is_seen(actor.machine):
            await self.ray.machines_changed.wait()
        await self.process.runs()

    async def actor(self) -> Actor:
        return await asyncio.shield(self._actor)

    async def act(self, what: str, work: Callable[[Any], Awaitable[T]]) -> T:
        actor = await self.actor()

        async def there() -> T:
            self.ray.on_act(self.process, what, actor)
            return await work(actor)

        return await self.call(actor, there)

    async def ask(self, work: Callable[[Any], T]) -> T:
        actor = await self.actor()
        return await self.call(actor, lambda: _result_of(work, actor))

    async def start(self, report: Report) -> Any:
        process = self.process
        actor = await self.actor()

        async def there() -> Any:
            self.ray.on_act(process, "start", actor)
            return await actor.start(_while_alive(process, report), *self._given())

        started = await self._until_reached(actor, there)
        self._serves = True
        return started

    def _given(self) -> tuple[Any, ...]:
        return ()

    async def ended(self) -> str:
        try:
            actor = await self.actor()
        except TandemError as error:
            return str(error)
        why = await asyncio.shield(actor.ended)
        await self._until_seen(actor)
        return why

    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        return await self.ask(lambda actor: actor.log.page(after, last, most))

    async def drain(self, timeout_s: float) -> bool:
        return await self.act("drain", lambda actor: actor.drain(timeout_s))

    async def stop(self) -> None:
        await self.process.step()
        await asyncio.wait({self._actor}, timeout=_ADOPT_S + _NAME_S)
        if self._actor.done() and not self._actor.cancelled() and self._actor.exception() is None:
            actor = self._actor.result()
            if self._serves:
                with contextlib.suppress(TandemError, TimeoutError):
                    await asyncio.wait_for(self.call(actor, lambda: _result(None)), self._stop_s)
            await self._kill(actor)
        self._actor.cancel()
        with contextlib.suppress(TandemError, asyncio.CancelledError):
            await self._actor
        await self.process.runs()


async def _result(value: T) -> T:
    return value


async def _result_of(work: Callable[[Any], T], actor: Actor) -> T:
    return work(actor)


def _while_alive(process: ControllerProcess, report: Report) -> Report:
    def told(what: str, fraction: float) -> None:
        if process.is_alive and not process.is_stopped:
            report(what, fraction)

    return told


class NodeHandleOf(HandleOf):
    keepers: Mapping[str, Any] = {}

    async def admit(self, keys: list[str]) -> None:
        async def admitted(actor: Any) -> None:
            actor.admitted = keys

        await self.act("admit", admitted)

    async def status(self) -> NodeStatus:
        return await self.ask(lambda actor: actor.status())

    async def routers_heard(self) -> list[str]:
        return await self.ask(lambda node: _routers_of(self.ray, node))

    async def reset_cache(self, timeout_s: float) -> bool:
        async def reset(actor: Any) -> bool:
            await asyncio.sleep(0.1)
            return True

        return await self.act("reset", reset)

    async def set_adapters(self, wanted: Mapping[str, str], timeout_s: float, report: Report) -> dict[str, str]:
        async def told(actor: Any) -> dict[str, str]:
            await asyncio.sleep(0.2)
            actor.adapters = dict(wanted)
            return {name: f"files in {where}" for name, where in wanted.items()}

        return await self.act("set adapters", told)

    async def change_role(self, config: NodeConfig, report: Report) -> NodeInfo:
        return await self.act("change role", lambda actor: actor.change_role(config))


def _routers_of(ray: SimulatedRay, node: NodeActor) -> list[str]:
    return [
        router.info.inbox_endpoint
        for router in ray.living()
        if isinstance(router, RouterActor)
        and router.answers.is_set()
        and any(info.epoch == node.info.epoch for info in router.members)
    ]


class RouterHandleOf(HandleOf):
    door = ""

    def _given(self) -> tuple[Any, ...]:
        return (self.door,)

    async def set_members(
        self, members: list[NodeInfo], paused: Sequence[str], desks: Mapping[str, str], pools: Sequence[PoolReport]
    ) -> RouterQueue:
        return await self.act(
            "set members", lambda actor: _result_of(lambda router: router.set_members(members, paused), actor)
        )

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        await self.ask(lambda actor: None)

    async def follow_forecasts(self, score: ForecastScore, ended_within_s: float) -> list[MeasuredRequest]:
        return await self.ask(lambda actor: [])

    async def recalled(self) -> bytes:
        return await self.ask(lambda actor: b"")

    async def nodes_heard(self) -> list[NodeSighting]:
        return await self.ask(lambda actor: actor.sightings())

    async def answers_clients(self) -> bool:
        await self.process.step()
        await self.ray.delay(self._caller)
        actor = self._actor.result() if self._actor.done() and not self._actor.cancelled() else None
        return actor is not None and actor.is_alive and actor.has_started and actor.answers.is_set()

    async def leave(self, timeout_s: float) -> bool:
        return await self.act("leave", lambda actor: actor.leave(timeout_s))
