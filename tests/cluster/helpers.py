"""A cluster without processes: a launcher whose nodes do what a test tells them, and a clock that a test moves."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from cluster.clock import Clock
from cluster.config import ClusterTimeouts
from cluster.controller import Controller
from cluster.launcher import Report
from engine.node_config import NodeConfig, NodeTimeouts
from router.config import RouterConfig
from wire.errors import NodeLost, TandemError
from wire.nodes import NodeInfo, NodeState, Role
from wire.requests import NodeCounters, NodeStatus

PATIENCE_S = 10.0

TIMEOUTS = ClusterTimeouts(
    start_s=100.0,
    heartbeat_s=1.0,
    silence_s=3.0,
    unresponsive_s=10.0,
    step_s=50.0,
    restart_backoff_s=1.0,
    restart_backoff_max_s=8.0,
    stop_s=5.0,
    nodes=NodeTimeouts(drain_s=30.0),
)


def in_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test, within a deadline, and fails it when it leaves a task behind."""

    @functools.wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        async def run() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(*args, **kwargs)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"the test left tasks behind: {left}"

        asyncio.run(run())

    return test


async def settle() -> None:
    """Lets everything run that can run without time passing."""
    for _ in range(100):
        await asyncio.sleep(0)


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
            self._now, _, done = heapq.heappop(self._sleepers)
            if not done.done():
                done.set_result(None)
                await settle()
        self._now = end


class FakeProcess:
    """What nodes and routers have in common: it starts, it may die, it is stopped."""

    def __init__(self) -> None:
        self.start_error: TandemError | None = None
        self.starts_at_once = True
        self.may_start = asyncio.Event()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopped = False
        self.drained_with: float | None = None
        self.drains = True
        self.mute = asyncio.Event()  # set: it answers nothing any more, like a stopped process

    async def _begin(self) -> None:
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

    async def drain(self, timeout_s: float) -> bool:
        await self._answer()
        self.drained_with = timeout_s
        return self.drains

    async def stop(self) -> None:
        self.stopped = True
        if not self.died.done():
            self.died.set_result("it was stopped")


class FakeNode(FakeProcess):
    def __init__(self, config: NodeConfig, epoch: int) -> None:
        super().__init__()
        self.config = config
        self.info = NodeInfo(
            node_id=config.node_id,
            role=config.role,
            epoch=epoch,
            request_endpoint=f"tcp://{config.node_id}:{epoch}",
            peer_endpoint="",
            model="fake",
            max_model_len=100,
            block_size=16,
        )
        self.state = NodeState.READY
        self.epoch_in_status = epoch
        self.step_age_s = 0.0

    async def start(self, report: Report) -> NodeInfo:
        report("loading the weights", 0.5)
        await self._begin()
        return self.info

    async def status(self) -> NodeStatus:
        await self._answer()
        return NodeStatus(
            node_id=self.info.node_id,
            role=self.info.role,
            epoch=self.epoch_in_status,
            state=self.state,
            free_blocks=1,
            total_blocks=1,
            running=0,
            waiting=0,
            waiting_tokens=0,
            transfers=0,
            held_blocks=0,
            step_age_s=self.step_age_s,
            counters=NodeCounters(),
            detail="out of luck" if self.state is NodeState.FAILED else "",
        )


class FakeRouter(FakeProcess):
    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.memberships: list[list[NodeInfo]] = []

    async def start(self, report: Report) -> str:
        await self._begin()
        return f"http://{self.config.host}:{self.config.port}"

    async def set_members(self, members: list[NodeInfo]) -> None:
        await self._answer()
        self.memberships.append(members)

    @property
    def node_ids(self) -> set[str]:
        return {member.node_id for member in self.memberships[-1]}


Prepare = Callable[[FakeProcess, int], None]
"""Called with every new process and how many there were before it under its name."""


class FakeLauncher:
    """Keeps every process that it ever launched, by name."""

    def __init__(self) -> None:
        self.nodes: defaultdict[str, list[FakeNode]] = defaultdict(list)
        self.routers: list[FakeRouter] = []
        self.prepare: dict[str, Prepare] = {}
        self._epochs = itertools.count(1)

    def launch_node(self, config: NodeConfig) -> FakeNode:
        node = FakeNode(config, next(self._epochs))
        self._prepare(config.node_id, node, len(self.nodes[config.node_id]))
        self.nodes[config.node_id].append(node)
        return node

    def launch_router(self, config: RouterConfig) -> FakeRouter:
        router = FakeRouter(config)
        self._prepare("router", router, len(self.routers))
        self.routers.append(router)
        return router

    def _prepare(self, name: str, process: FakeProcess, earlier: int) -> None:
        if name in self.prepare:
            self.prepare[name](process, earlier)

    def node(self, node_id: str) -> FakeNode:
        """The latest incarnation."""
        return self.nodes[node_id][-1]

    @property
    def router(self) -> FakeRouter:
        return self.routers[-1]

    @property
    def everything(self) -> list[FakeProcess]:
        return [*self.routers, *itertools.chain.from_iterable(self.nodes.values())]


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


class Rig:
    """A controller with everything around it in a test's hands."""

    def __init__(self, *nodes: tuple[str, Role]) -> None:
        self.launcher = FakeLauncher()
        self.clock = FakeClock()
        self.events = RecordedEvents()
        self.controller = Controller(
            [NodeConfig(node_id=name, role=role) for name, role in nodes],
            RouterConfig(tokenizer_path="model", model_name="fake"),
            self.launcher,
            TIMEOUTS,
            self.events,
            self.clock,
        )

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.controller.stop()
        assert all(process.stopped for process in self.launcher.everything), "stop() left something running"

    @property
    def routed(self) -> set[str]:
        """The nodes that the router was last told of."""
        return self.launcher.router.node_ids


async def eventually(future: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(asyncio.ensure_future(future), PATIENCE_S)
