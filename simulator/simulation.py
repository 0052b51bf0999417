"""One simulation: plays the traffic through the product's own router, schedulers and autoscaler on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import TandemError, WireError
from tandem.loadgen.metrics import Distribution
from tandem.loadgen.traces import TraceRow
from tandem.router.dispatch import Dispatcher
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.simulator.clock import VirtualLoop
from tandem.simulator.network import Network
from tandem.simulator.node import SimulatedNode
from tandem.simulator.outcome import AnswerLog, AnswerTimes, SimulationReport
from tandem.simulator.pools import SimulatedPools
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.traffic import OWN_TEXT
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import Cancel, Holding, RequestFacts, Submit, TokenBatch, TurnEnded
from tandem.wire.sampling import SamplingParams

TENANT = "simulation"
OnProgress = Callable[[float, float, int], None]
"""Called with the share of the requests that have arrived, the simulated seconds, and the number of running requests."""
OnAnswer = Callable[[int, float, float], None]
"""Called with a request's index in the traffic, and its seconds to the first and to the last token."""
PROGRESS_S = 0.2
# After the last arrival: simulated seconds between two checks whether to give the run up.
LOOK_S = 10.0
# As GROUP and TURN_S in router/batches/runner.py.
LINES_AT_ONCE, LINES_LOOK_S = 32, 1.0
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


class SimulatedLinks:
    """Takes the place of the router's sockets. Messages arrive at once, and none is lost. No answer is kept, and no cache listed."""

    def __init__(self, on_holding: Callable[[Holding], None], on_joined: Callable[[NodeInfo], None]) -> None:
        self.endpoint = "sim://router"
        self.pools: SimulatedPools | None = None
        self.on_submit: Callable[[Submit], None] = lambda submit: None
        self._on_holding = on_holding
        self._on_joined = on_joined
        self._sent = 0

    def _there(self, node: NodeInfo) -> SimulatedNode | None:
        return self.pools.by_id.get(node.node_id) if self.pools is not None else None

    def submit(self, node: NodeInfo, submit: Submit) -> Position:
        self._sent += 1
        self.on_submit(submit)
        if (there := self._there(node)) is not None:
            there.deliver(submit)
        return Position(0, self._sent)

    def cancel(self, node: NodeInfo, request_id: str) -> None:
        if (there := self._there(node)) is not None and request_id in there.held():
            there.deliver(Cancel(self.endpoint, [request_id]))

    def turn_ended(self, node: NodeInfo, request_id: str, job_id: str, called: list[str] | None) -> None:
        if (there := self._there(node)) is not None:
            there.deliver(TurnEnded(self.endpoint, request_id, job_id, called))

    def ask(self, node: NodeInfo) -> None:
        if (there := self._there(node)) is not None:
            holding = Holding(node.node_id, node.epoch, 0, self._sent, there.held())
            asyncio.get_running_loop().call_soon(self._on_holding, holding)

    def has_heard(self, node: NodeInfo, message: Position) -> bool:
        return True

    def deaf_for(self, node: NodeInfo) -> float:
        return 0.0

    def ping(self, node: NodeInfo) -> None:
        self._on_joined(node)

    def meet(self, node: NodeInfo) -> None: ...
    def list_cache(self, node: NodeInfo) -> None: ...
    def begin_anew(self, node: NodeInfo) -> None: ...
    def forget(self, node: NodeInfo) -> None: ...
    def recall(self, node: NodeInfo, answer_id: str) -> None: ...
    def follow(self, node: NodeInfo, request_id: str, answer_id: str, after: int) -> None: ...
    def end_answer(self, node: NodeInfo, answer_id: str, error: WireError, *, forget: bool) -> None: ...


def simulate(
    setup: SimulationSetup, on_progress: OnProgress | None = None, on_answer: OnAnswer | None = None
) -> SimulationReport:
    setup.check()
    loop = VirtualLoop()
    try:
        with _rare_collections():
            return loop.run_until_complete(_Simulation(setup, on_progress, on_answer).run())
    except KeyboardInterrupt:
        _end_tasks(loop)
        raise
    finally:
        loop.close()


def _end_tasks(loop: VirtualLoop) -> None:
    """Each task that is still there would tell on the terminal that its loop was closed."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(Exception):  # the interrupt came in the middle of something
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes the garbage collector run seldom. Reference counts free nearly everything that a simulation creates, and the collector would
    walk again and again over what stays: a thousand nodes, their schedulers and the traffic."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Simulation:
    def __init__(self, setup: SimulationSetup, on_progress: OnProgress | None, on_answer: OnAnswer | None) -> None:
        self._setup = setup
        self._config = setup.config
        self._on_progress = on_progress
        self._on_answer = on_answer
        self._shown_at = 0.0
        self._came = 0
        self._lines_begun = self._lines_answered = 0
        self._line_tasks: set[asyncio.Task[None]] = set()

    def _assemble(self) -> None:
        setup, config = self._setup, self._config.router
        self._loop = loop = asyncio.get_running_loop()
        any_costs = next(iter(setup.costs.values()))
        self._request_cost = any_costs.request
        self._outcome = AnswerLog(setup.slo, self._request_cost.answer_s)
        self._router_pool = NodePool(
            config.model_name,
            config.heartbeat,
            loop.time,
            on_lost=lambda node, why: self._dispatcher.on_node_lost(node, why),
            on_change=lambda: self._dispatcher.on_pool_change(),
        )
        links = SimulatedLinks(lambda holding: self._dispatcher.on_holding(holding), self._on_ping)
        links.on_submit = self._on_submit
        self._dispatcher = Dispatcher(
            config,
            links,
            self._router_pool,
            Chooser(self._router_pool, config.policy, config.local_prefill, config.limits.cached_blocks),
            RouterMetrics(),
            loop.time,
        )
        network = Network(loop, setup.costs.get(Role.PREFILL, any_costs))
        self._pools = SimulatedPools(setup, network, self._outcome, self._on_tokens, self._on_members)
        links.pools = self._pools

    async def run(self) -> SimulationReport:
        self._assemble()
        self._on_members()
        if self._setup.counted_from:
            self._loop.call_at(self._setup.counted_from, self._count_from_here)
        autoscaler = self._pools.autoscaler(lambda text: None)
        self._is_scaled = autoscaler is not None
        background = [self._loop.create_task(self._heartbeat())]
        if autoscaler is not None:
            background.append(self._loop.create_task(autoscaler.run()))
        if self._setup.line is not None:
            background.append(self._loop.create_task(self._answer_lines(self._setup.line)))
        try:
            async with asyncio.TaskGroup() as requests:
                guard = requests.create_task(self._guard(background))
                await self._arrive(requests, guard)
        finally:
            ended = [*background, *self._line_tasks]
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            await self._pools.stop()
        return self._report()

    async def _guard(self, background: list[asyncio.Task[None]]) -> None:
        """Ends the run when a background task dies."""
        await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                task.result()

    async def _arrive(self, requests: asyncio.TaskGroup, guard: asyncio.Task[None]) -> None:
        rows, cost = self._setup.traffic.rows, self._request_cost
        under_way: set[asyncio.Task[None]] = set()
        for index, row in enumerate(rows):
            at = row.arrival_s
            if at > self._loop.time():
                await asyncio.sleep(at - self._loop.time())
            delay = cost.arrive_s + cost.arrive_per_token_s * row.input_tokens
            task = requests.create_task(self._ask(index, delay))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            self._came += 1
            self._show()
            if self._is_hopeless():
                break
        while under_way and not self._is_hopeless():
            await asyncio.wait(under_way, timeout=LOOK_S)
            self._show()
        for task in under_way:
            task.cancel()
        guard.cancel()

    async def _answer_lines(self, line: TraceRow) -> None:
        """Begins lines as `router.batches.runner` does: as many as are idle, looking again when one ends, or after a while."""
        while True:
            for _ in range(min(LINES_AT_ONCE, self._dispatcher.idle_room() - len(self._line_tasks))):
                task = self._loop.create_task(self._answer_line(line, self._lines_begun))
                self._lines_begun += 1
                self._line_tasks.add(task)
                task.add_done_callback(self._line_tasks.discard)
            if self._line_tasks:
                await asyncio.wait(self._line_tasks, timeout=LINES_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(LINES_LOOK_S)

    async def _answer_line(self, line: TraceRow, index: int) -> None:
        seed = len(self._setup.traffic.rows) + index
        facts = RequestFacts(
            prompt_token_ids=[OWN_TEXT + seed] * line.input_tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=line.output_tokens, ignore_eos=True, seed=seed),
            when_idle=True,
        )
        spec = SequenceSpec(f"line {index}", facts, self._loop.time() + self._config.router.timeouts.total)
        try:
            generation = await self._dispatcher.generate([spec], TENANT, eager=False)
        except TandemError:
            await asyncio.sleep(LINES_LOOK_S / 2)
            return
        (life,) = generation.lives
        try:
            while not life.ended:
                await generation.news()
        finally:
            generation.cancel()
        self._lines_answered += life.error is None

    def _is_hopeless(self) -> bool:
        return self._outcome.bad > (1.0 - self._setup.give_up_below) * len(self._setup.traffic.rows)

    def _show(self) -> None:
        now = time.monotonic()
        if self._on_progress is not None and now - self._shown_at > PROGRESS_S:
            self._shown_at = now
            share = self._came / len(self._setup.traffic.rows)
            self._on_progress(share, self._loop.time(), self._dispatcher.running)

    async def _ask(self, index: int, delay: float) -> None:
        row = self._setup.traffic.rows[index]
        if delay:
            await asyncio.sleep(delay)
        # The seed carries the request's index to the nodes, which make the answer's token from it.
        sampling = SamplingParams(temperature=0.0, max_tokens=row.output_tokens, ignore_eos=True, seed=index)
        spec = SequenceSpec(
            label=f"request {index}",
            facts=RequestFacts(prompt_token_ids=self._setup.traffic.prompt(index), sampling=sampling),
            deadline=self._loop.time() + self._config.router.timeouts.total,
        )
        try:
            generation = await self._dispatcher.generate([spec], TENANT, eager=False)
        except TandemError as error:
            self._outcome.on_refused(error.code)
            return
        (life,) = generation.lives
        while not life.ended:
            await generation.news()
        if life.error is not None:
            self._outcome.on_failed(life.request_ids[-1], life.error.code)
        else:
            first_s, whole_s = self._outcome.on_end(life.request_ids[-1], life.cached_tokens or 0)
            if self._on_answer is not None:
                self._on_answer(index, first_s, whole_s)

    # --- between the router and the nodes

    def _on_submit(self, submit: Submit) -> None:
        if submit.when_idle:
            return  # no one waits for it
        index = submit.sampling.seed or 0
        times = AnswerTimes(self._setup.traffic.rows[index].arrival_s, len(submit.prompt_token_ids))
        self._outcome.live.setdefault(submit.request_id, times)

    def _on_tokens(self, batch: TokenBatch) -> None:
        self._dispatcher.on_tokens(batch)

    def _on_ping(self, node: NodeInfo) -> None:
        if (there := self._pools.by_id.get(node.node_id)) is not None:
            self._dispatcher.on_status(there.status())

    def _on_members(self) -> None:
        came, went = self._router_pool.set_members([node.info for node in self._pools.nodes])
        for info in went:
            self._dispatcher.on_node_left(info)
        for info in came:
            self._dispatcher.on_node_joined(info)

    async def _heartbeat(self) -> None:
        every = self._config.router.heartbeat.ping_interval
        while True:
            # With an autoscaler the next look is unknown, because it reads the statuses at times of its own.
            if not self._is_scaled:
                self._pools.next_look.at = self._loop.time() + every
            await asyncio.sleep(every)
            for node in self._pools.nodes:
                self._dispatcher.on_status(node.status())
            self._pools.retire()

    # --- the report

    def _count_from_here(self) -> None:
        for node in self._pools.nodes:
            node.count_from_here()

    def _report(self) -> SimulationReport:
        outcome, slo = self._outcome, self._setup.slo
        seconds = max(outcome.last_at, self._setup.traffic.seconds)
        per_second = 1.0 / seconds if seconds > 0 else 0.0
        loads = self._pools.loads()
        by_role: dict[str, float] = {}
        for load in loads:
            by_role[load.role] = by_role.get(load.role, 0.0) + load.seconds
        total = len(self._setup.traffic.rows)
        return SimulationReport(
            requests=total,
            served=outcome.served,
            refused=sum(outcome.refusals.values()),
            failed=sum(outcome.failures.values()),
            refusals=dict(outcome.refusals),
            failures=dict(outcome.failures),
            misses=dict(outcome.misses),
            given_up=self._is_hopeless(),
            lines=self._lines_answered,
            seconds=seconds,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.output_tokens,
            requests_per_s=outcome.served * per_second,
            ttft_ms=Distribution.of(outcome.ttft),
            itl_ms=outcome.gaps.distribution(),
            tpot_ms=Distribution.of(outcome.tpot),
            e2e_ms=Distribution.of(outcome.e2e),
            slo=str(slo) if slo is not None else None,
            attainment=outcome.good / total if slo is not None and total else None,
            goodput_per_s=outcome.good * per_second if slo is not None else None,
            bytes_moved=self._pools.bytes_moved,
            nodes=loads,
            node_seconds=by_role,
            changes=self._pools.changes,
            role_changes=self._pools.role_changes,
        )
