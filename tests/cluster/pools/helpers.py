"""A cluster without processes: a fake launcher, fake nodes and routers that do what the test says, and a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tandem.base.errors import NodeLost, TandemError, Unavailable
from tandem.base.logs import LogPage, LogPosition, RecentLines
from tandem.base.progress import Report
from tandem.cluster.config import DEFAULT_MODEL, ClusterTimeouts, PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.launcher import Confirm, Host, LogSource, Needs, Offer, TakenPlace
from tandem.cluster.pools.controller import Controller
from tandem.cluster.pools.room import places, places_left
from tandem.cluster.tasks import Clock
from tandem.node.config import NodeConfig, NodeTimeouts
from tandem.router.config import RouterConfig
from tandem.wire.endpoints import Endpoint, key_text
from tandem.wire.forecasts import ForecastScore, MeasuredRequest
from tandem.wire.nodes import NodeInfo, NodeSighting, NodeState, PoolReport, Role, RouterInfo, RouterQueue
from tandem.wire.requests import NodeCounters, NodeStatus, SickDevice
from tests.cluster.pools.memory_store import MemoryStore
from tests.loops import PATIENCE_S as PATIENCE_S
from tests.loops import in_loop as in_loop

TIMEOUTS = ClusterTimeouts(
    start_s=100.0, heartbeat_s=1.0, silence_s=3.0, unresponsive_s=10.0, step_s=50.0, restart_backoff_s=1.0,
    restart_backoff_max_s=8.0, stop_s=5.0, nodes=NodeTimeouts(drain_s=30.0),
)  # fmt: skip


T = TypeVar("T")


async def settle() -> None:
    """Runs all tasks until each waits for time to pass or for the test."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # what the loop would run next
    await asyncio.sleep(0)
    for _ in range(1000):
        if not ready:
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to rest")


class FakeClock(Clock):
    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), done))
        await done

    async def advance(self, seconds: float) -> None:
        await settle()
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            when, _, done = heapq.heappop(self._sleepers)
            self._now = max(self._now, when)
            if not done.done():
                done.set_result(None)
                await settle()
        self._now = max(self._now, end)

    def stand_still(self, seconds: float) -> None:
        """Advances the clock without waking any task, as if the process had been stopped."""
        self._now += seconds


class FakeProcess:
    """The common part of fake nodes and routers: starting, dying, draining and stopping."""

    def __init__(self) -> None:
        self.start_error: TandemError | None = None
        self.starts_at_once = True
        self.may_start = asyncio.Event()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopped = False
        self.drained_with: float | None = None
        self.drains = True
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.on_stop: Callable[[], None] = lambda: None
        self.log = RecentLines()
        self.mute = asyncio.Event()  # set: it answers no call, like a stopped process
        self.can_be_reached = True  # else it is neither found nor stopped, and ends only by its name
        self.report: Report = lambda what, share: None  # reports the progress of its start or load
        self.may_load = asyncio.Event()  # set: it finishes the loads that it is told to do while it serves
        self.may_load.set()

    async def _begin(self) -> None:
        if not self.can_be_reached:
            await asyncio.Event().wait()
        if not self.starts_at_once:
            await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error

    async def _answer(self) -> None:
        if self.died.done():
            raise NodeLost(self.died.result())
        if self.mute.is_set():
            await asyncio.Event().wait()

    def die(self, why: str = "killed by the test") -> None:
        self.died.set_result(why)

    async def ended(self) -> str:
        return await asyncio.shield(self.died)

    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        await self._answer()
        return self.log.page(after, last, most)

    async def drain(self, timeout_s: float) -> bool:
        await self._answer()
        self.drained_with = timeout_s
        await self.may_finish.wait()
        return self.drains

    async def stop(self) -> None:
        if self.can_be_reached:
            await self.end()

    async def end(self) -> None:
        if not self.stopped:
            self.on_stop()
        await self.may_stop.wait()
        self.stopped = True
        if not self.died.done():
            self.died.set_result("it was stopped")


def key_of_fake(name: str, incarnation: int) -> str:
    return key_text(hashlib.sha256(f"{name}/{incarnation}".encode()).digest())


def endpoint_of(name: str, incarnation: int) -> str:
    return str(Endpoint(key_of_fake(name, incarnation), "10.0.0.1", 1000 + incarnation))


def content_of(path: str) -> str:
    return "the weights" if path == DEFAULT_MODEL else f"the weights of {path}"


def node_info(config: NodeConfig, epoch: int) -> NodeInfo:
    return NodeInfo(
        node_id=config.node_id, role=config.role, epoch=epoch, request_endpoint=endpoint_of(config.node_id, epoch),
        peer_endpoint="", model="fake", max_model_len=100, block_size=16,
        content=content_of(config.engine.model.path),
    )  # fmt: skip


def status_of(node_id: str, role: Role, **fields: Any) -> NodeStatus:
    """An idle node's, but for these fields."""
    idle = {
        "free_blocks": 100,
        "total_blocks": 100,
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
        "transfers": 0,
        "held_blocks": 0,
    }
    given = {"epoch": 1, "state": NodeState.READY, "step_age_s": 0.0, "counters": NodeCounters(), **idle, **fields}
    return NodeStatus(node_id, role, **given)


class FakeNode(FakeProcess):
    def __init__(self, config: NodeConfig, host: Host, slot: Role, epochs: Iterator[int]) -> None:
        super().__init__()
        self.config = config
        self.host = host
        self.slot = slot
        self.needs: Mapping[str, float] = {}
        self.beside: list[Host] = []
        self.state = NodeState.READY
        self.step_age_s = 0.0
        self.free_blocks = 90
        self.sick: tuple[SickDevice, ...] = ()
        self.resets = 0
        self.finished: dict[str, int] = {}  # number of requests by how they ended
        self.client_errors = 0
        self.wrong_kv: dict[str, int] = {}  # blocks that it found wrong, by their sender
        self.heard: list[str] = []  # the addresses of the routers that it has heard
        self.silent_s: float | None = None  # how long routers have not heard it; None: as for the controller
        self.admitted: list[list[str]] = []  # the keys of each `admit` call
        self.adapters: dict[str, str] = {}
        self.adapter_error: TandemError | None = None
        self.files = "files"  # the content of every folder on its machine
        self.times_told = 0
        self.is_routed: Callable[[FakeNode], bool] = lambda node: False
        self.routed_when_told: bool | None = None
        self._epochs = epochs
        self._begin_epoch()

    @property
    def keepers(self) -> dict[str, LogSource]:
        return {f"{self.config.node_id}-machine{number}": self for number, _ in enumerate(self.beside, 1)}

    def _begin_epoch(self) -> None:
        self.info = node_info(self.config, next(self._epochs))
        self.epoch_in_status = self.info.epoch

    async def admit(self, keys: list[str]) -> None:
        await self._answer()
        self.admitted.append(keys)

    async def routers_heard(self) -> list[str]:
        await self._answer()
        return self.heard

    async def drain(self, timeout_s: float) -> bool:
        self.state = NodeState.DRAINING
        return await super().drain(timeout_s)

    async def reset_cache(self, timeout_s: float) -> bool:
        await self._answer()
        self.resets += 1
        return True

    async def set_adapters(self, wanted: Mapping[str, str], timeout_s: float, report: Report) -> dict[str, str]:
        self.report = report
        await self.may_load.wait()
        await self._answer()
        self.times_told += 1
        self.routed_when_told = self.is_routed(self)
        if self.adapter_error is not None:
            raise self.adapter_error
        self.adapters = dict(wanted)
        return self.digests

    @property
    def digests(self) -> dict[str, str]:
        return {name: f"{self.files} in {where}" for name, where in self.adapters.items()}

    async def change_role(self, config: NodeConfig, report: Report) -> NodeInfo:
        self.report = report
        await self.may_load.wait()
        await self._answer()
        if self.drained_with is None or not self.drains:
            raise Unavailable("it still has work")
        self.config, self.state, self.drained_with = config, NodeState.READY, None
        self._begin_epoch()
        return self.info

    async def start(self, report: Report) -> NodeInfo:
        self.report = report
        report("loading the weights", 0.5)
        await self._begin()
        return self.info

    async def status(self) -> NodeStatus:
        await self._answer()
        return status_of(
            self.info.node_id, self.info.role, epoch=self.epoch_in_status, state=self.state,
            free_blocks=self.free_blocks, step_age_s=self.step_age_s,
            counters=NodeCounters(requests_finished=self.finished, client_errors=self.client_errors, wrong_kv=self.wrong_kv),
            detail="out of luck" if self.state is NodeState.FAILED else "", sick=self.sick,
        )  # fmt: skip


class FakeRouter(FakeProcess):
    def __init__(self, name: str, config: RouterConfig, host: Host | None, incarnation: int) -> None:
        super().__init__()
        self.name = name
        self.incarnation = incarnation
        self.config = config
        self.host = host
        self.hears: Callable[[NodeInfo], NodeSighting] = lambda info: NodeSighting(info.node_id, info.epoch, 0.0)
        self.serves = False  # whether it answers at its URL
        self.load = RouterQueue()
        self.door = ""  # the door of the router from which it took the listening socket
        self.left_with: float | None = None
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self.memberships: list[list[NodeInfo]] = []
        self.paused: list[str] = []
        self.desks: dict[str, str] = {}  # the desks of the routers on its port, as last told
        self.pools: dict[Role, PoolReport] = {}  # as last told
        self.forgot: list[list[str]] = []  # the nodes that had emptied their caches, for each call
        self.on_members: Callable[[], None] = lambda: None
        self.adapters_of: Callable[[str], dict[str, str]] = lambda node_id: {}
        self.hears_adapters = True
        self.forecasts = ForecastScore()  # as last told
        self.recalls = b""
        self.took: Callable[[], list[MeasuredRequest]] = list  # the requests that it has answered

    async def start(self, report: Report) -> RouterInfo:
        self.report = report
        await self._begin()
        return RouterInfo(
            f"http://{self.config.host}:{self.config.port}",
            endpoint_of(self.name, self.incarnation),
            f"door of {self.name} {self.incarnation}",
            f"desk of {self.name} {self.incarnation}",
        )

    async def leave(self, timeout_s: float) -> bool:
        await self._answer()
        self.left_with = timeout_s
        await self.may_leave.wait()
        return True

    async def set_members(
        self, members: list[NodeInfo], paused: Sequence[str], desks: Mapping[str, str], pools: Sequence[PoolReport]
    ) -> RouterQueue:
        self.desks, self.pools = dict(desks), {pool.role: pool for pool in pools}
        await self._answer()
        self.memberships.append(members)
        self.paused = list(paused)
        self.on_members()
        self.load = msgspec.structs.replace(self.load, accepts=True)
        served = [self.adapters_of(info.node_id).items() for info in members if self.hears_adapters]
        return msgspec.structs.replace(self.load, adapters=dict(set.intersection(*map(set, served or [()]))))

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        await self._answer()
        self.forgot.append(list(node_ids))

    async def follow_forecasts(self, score: ForecastScore, ended_within_s: float) -> list[MeasuredRequest]:
        await self._answer()
        self.forecasts = score
        return [request for request in self.took() if request.ended_ago_s <= ended_within_s]

    async def recalled(self) -> bytes:
        await self._answer()
        return self.recalls

    async def nodes_heard(self) -> list[NodeSighting]:
        await self._answer()
        return [self.hears(info) for info in self.memberships[-1]] if self.memberships else []

    async def answers_clients(self) -> bool:
        return self.serves

    @property
    def node_ids(self) -> set[str]:
        return {member.node_id for member in self.memberships[-1]}


Prepare = Callable[[FakeProcess, int], None]
"""Called with every new process and how many there were before it under its name."""


class FakeLauncher:
    """Keeps every process that it launched, by name. A launch adopts the process of that name if it still runs."""

    def __init__(self) -> None:
        self.nodes: defaultdict[str, list[FakeNode]] = defaultdict(list)
        self.routers: list[FakeRouter] = []
        self.prepare: dict[str, Prepare] = {}
        self._epochs = itertools.count(1)

    def launch_node(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        confirm: Confirm,
        beside: Sequence[Host] = (),
    ) -> FakeNode:
        earlier = self.nodes[config.node_id]
        if earlier and not earlier[-1].died.done():
            assert earlier[-1].host.name == host.name, "a node cannot be adopted on another machine"
            return earlier[-1]
        node = FakeNode(config, host, slot, self._epochs)
        node.needs = needs
        node.beside = list(beside)
        node.is_routed = self._is_routed
        self._prepare(config.node_id, node, len(earlier))
        earlier.append(node)
        return node

    def launch_router(
        self, name: str, config: RouterConfig, host: Host | None, confirm: Confirm, door: str = ""
    ) -> FakeRouter:
        earlier = [router for router in self.routers if router.name == name]
        if earlier and not earlier[-1].died.done():
            return earlier[-1]
        router = FakeRouter(name, config, host, len(earlier))
        router.hears = self._heard_by_routers
        router.adapters_of = lambda node_id: self.node(node_id).digests
        router.door = door
        self._prepare(name, router, len(earlier))
        self.routers.append(router)
        return router

    async def end(self, name: str) -> None:
        for process in self.nodes[name][-1:]:
            await process.end()

    def _is_routed(self, node: FakeNode) -> bool:
        told = [router.memberships[-1] for router in self.routers if router.memberships]
        return any(node.info.epoch == member.epoch for members in told for member in members)

    def _heard_by_routers(self, info: NodeInfo) -> NodeSighting:
        node = self.node(info.node_id)
        gone = node.mute.is_set() or node.died.done()
        silent_s = (1e6 if gone else 0.0) if node.silent_s is None else node.silent_s
        return NodeSighting(info.node_id, info.epoch, silent_s, node.state, node.step_age_s)

    def _prepare(self, name: str, process: FakeProcess, earlier: int) -> None:
        if name in self.prepare:
            self.prepare[name](process, earlier)

    def node(self, node_id: str) -> FakeNode:
        """The latest incarnation of a node."""
        return self.nodes[node_id][-1]

    @property
    def router(self) -> FakeRouter:
        return self.routers[-1]

    @property
    def everything(self) -> list[FakeProcess]:
        return [*self.routers, *itertools.chain.from_iterable(self.nodes.values())]

    @property
    def running(self) -> list[FakeNode]:
        return [node for nodes in self.nodes.values() for node in nodes if not node.died.done()]


def one_machine(cores: int = 4) -> Host:
    return Host("this machine", "127.0.0.1", tuple(range(cores)), head=True)


class FakeHosts:
    """Machines that the test adds and removes."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = list(hosts)
        self.wanted: dict[Role, int] = {}
        self.offers: dict[str, Offer] = {}  # by name: the machines whose places follow from their resources
        self.needs: Needs = {}
        self.taken: Sequence[TakenPlace] = ()
        self.error: TandemError | None = None
        self._changed = asyncio.Event()

    async def present(self) -> list[Host]:
        if self.error is not None:
            raise self.error
        return [self._with_places(host) for host in self.hosts]

    def _with_places(self, host: Host) -> Host:
        offer = self.offers.get(host.name)
        if offer is None:
            return host
        here = [place for place in self.taken if place.host == host.name]
        return msgspec.structs.replace(
            host, slots=places_left(offer, self.needs, here), fits=frozenset(places(offer, self.needs))
        )

    async def changed(self, timeout_s: float) -> None:
        """Ignores the timeout, because the test controls time; returns only at a change."""
        await self._changed.wait()
        self._changed.clear()

    def placing(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def use(self, needs: Needs, taken: Sequence[TakenPlace]) -> None:
        self.needs, self.taken = needs, taken

    async def want(self, slots: dict[Role, int]) -> None:
        self.wanted = slots

    def forget_waiters(self) -> None:
        """The caller that waited is gone. The next caller reads what has changed since."""
        self._changed = asyncio.Event()

    def join(self, host: Host) -> None:
        self.hosts.append(host)
        self._changed.set()

    def leave(self, name: str) -> Host:
        (host,) = [host for host in self.hosts if host.name == name]
        self.hosts.remove(host)
        self._changed.set()
        return host


class RecordedEvents:
    def __init__(self) -> None:
        self.happened: list[tuple[str, str, str]] = []

    def progress(self, name: str, what: str, fraction: float) -> None:
        self.happened.append(("progress", name, what))

    def ready(self, name: str, what: str) -> None:
        self.happened.append(("ready", name, what))

    def trouble(self, name: str, what: str) -> None:
        self.happened.append(("trouble", name, what))

    def gave_up(self, name: str, why: str) -> None:
        self.happened.append(("gave_up", name, why))

    def of(self, kind: str, name: str) -> list[str]:
        return [what for k, n, what in self.happened if (k, n) == (kind, name)]


def pools_of(nodes: Iterable[tuple[str, Role]]) -> PoolsConfig:
    counts = Counter(role for _, role in nodes)
    return PoolsConfig(**{role.value: PoolConfig(nodes=counts[role]) for role in Role})


class Rig:
    """A controller whose whole environment the test controls."""

    def __init__(
        self,
        *nodes: tuple[str, Role],
        pools: PoolsConfig | None = None,
        hosts: FakeHosts | None = None,
        config: TandemConfig | None = None,
        timeouts: ClusterTimeouts = TIMEOUTS,
    ) -> None:
        self.launcher = FakeLauncher()
        self.clock = FakeClock()
        self.events = RecordedEvents()
        self.hosts = hosts or FakeHosts(one_machine())
        self.store = MemoryStore()
        self.commit = ""
        config = config or TandemConfig(router=RouterConfig(tokenizer_path="model", model_name="fake"))
        self.config = msgspec.structs.replace(config, pools=pools or pools_of(nodes), timeouts=timeouts)
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        return Controller(self.config, self.hosts, self.launcher, self.store, self.events, self.clock, self.fix_model)

    async def fix_model(self, config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
        """Resolves the model as a hub would where its name stands for `self.commit` now."""
        commit = commit or self.commit
        model = msgspec.structs.replace(config.model, path=f"org/model@{commit}")
        return (msgspec.structs.replace(config, model=model) if commit else config), commit

    async def during(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """What `work` returns, which goes on while this much time passes."""
        task = asyncio.create_task(work)
        await self.clock.advance(seconds)
        return await task

    async def start(self, seconds: float = 0.0) -> None:
        await self.during(self.controller.start(), seconds)

    async def kill_controller(self) -> None:
        """Ends the controller as its process's death does: its tasks end, and the processes that it launched go on."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.hosts.forget_waiters()
        self.controller = self.new_controller()

    async def next_controller(self, seconds: float = 0.0) -> None:
        """Another controller takes over from one that was killed."""
        await self.kill_controller()
        await self.start(seconds)

    def hold(self, *names: str) -> None:
        """Processes of these names start when the test lets them."""
        for name in names:
            self.launcher.prepare[name] = lambda process, _: setattr(process, "starts_at_once", False)

    def refuse(self, name: str, error: TandemError, times: int = 1000) -> None:
        """The first processes of this name do not start."""
        self.launcher.prepare[name] = lambda process, earlier: setattr(
            process, "start_error", error if earlier < times else None
        )

    def node(self, node_id: str) -> FakeNode:
        return self.launcher.node(node_id)

    async def decided(self) -> list[str]:
        return [decision.text for decision in (await self.controller.view()).decisions]

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.controller.stop()
        assert all(process.died.done() for process in self.launcher.everything), "stop() left something running"

    def lose_machine(self, name: str) -> Host:
        """Removes a machine and all processes on it; no message announces their end."""
        for process in self.launcher.everything:
            if (
                isinstance(process, FakeNode | FakeRouter)
                and process.host is not None
                and name in (process.host.name, *(there.name for there in getattr(process, "beside", ())))
            ):
                process.mute.set()
        return self.hosts.leave(name)

    @property
    def routed(self) -> set[str]:
        """The ids of the nodes that the router was last told of."""
        return self.launcher.router.node_ids


@contextlib.asynccontextmanager
async def started(*nodes: tuple[str, Role], **surroundings: Any) -> AsyncIterator[Rig]:
    """A rig whose controller has started."""
    async with Rig(*nodes, **surroundings) as rig:
        await rig.controller.start()
        yield rig
