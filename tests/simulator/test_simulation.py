"""A simulated cluster makes as many tokens as were asked for, at the times that the costs give, on the nodes that the router chose."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import ConfigurationError, InternalError
from tandem.cluster.cli import main
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.replay.reading import TraceReader
from tandem.engine.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow
from tandem.node.step_trace.records import StepTrace
from tandem.router.config import LocalPrefill, RouterConfig
from tandem.simulator.clock import VirtualLoop
from tandem.simulator.costs import BesideCost, read_costs
from tandem.simulator.node import SimulatedNode
from tandem.simulator.outcome import AnswerTimes, NodeLoad, SimulationReport
from tandem.simulator.simulation import SimulationSetup, _Simulation, simulate
from tandem.simulator.traffic import PlayedTraffic, rows_of_steps
from tandem.wire.nodes import Role
from tandem.wire.requests import RequestFacts, Submit
from tandem.wire.sampling import SamplingParams
from tests.engine.scheduling.driving import Driver
from tests.simulator.worlds import a_setup, apart, node_costs


def load_of(report: SimulationReport, role: str) -> NodeLoad:
    (load,) = [load for load in report.nodes if load.role == role]
    return load


def test_a_lone_request_takes_what_its_parts_take() -> None:
    costs = node_costs()
    report = simulate(a_setup(apart([(0.0, 512, 5)]), costs=costs))
    reading = costs.step_s([(512, 0)])
    expected = costs.request.arrive_s + reading + costs.request.answer_s
    assert report.ttft_ms is not None
    assert report.ttft_ms.p50 == pytest.approx(1e3 * expected)
    # The handover stands between the first token and the second, which the decode node's first step makes.
    handover = costs.transfer_s(512) + costs.transfer.handover_s
    steps = [costs.step_s([], 1, context) for context in range(512, 516)]
    assert report.tpot_ms is not None
    assert report.tpot_ms.p50 == pytest.approx(1e3 * (handover + sum(steps)) / 4)
    assert report.itl_ms is not None
    assert report.itl_ms.max == pytest.approx(1e3 * (handover + steps[0]), rel=0.002)
    assert report.bytes_moved == 512 * costs.kv_bytes_per_token


def test_prompts_are_read_on_one_node_and_answered_on_the_other() -> None:
    report = simulate(a_setup(apart([(0.1 * index, 300, 20) for index in range(30)])))
    prefill, decode = load_of(report, "prefill"), load_of(report, "decode")
    assert (report.served, report.output_tokens) == (30, 600)
    assert (prefill.prompt_tokens_computed, prefill.output_tokens) == (9000, 30)
    # The router may have a short prompt read where it is answered, when that costs less.
    assert decode.prompt_tokens_computed == 0
    assert decode.output_tokens == 600


def test_nodes_of_one_machine_slow_each_other() -> None:
    """While the prompt of the second request is read, the first one's answer is written."""
    costs = msgspec.structs.replace(node_costs(), beside=BesideCost(prefill=1.8, prefill_step_s=0.01, decode=1.5))
    rows = apart([(0.0, 16, 400), (1.0, 1024, 1)])
    apart_s, together_s = dict[int, float](), dict[int, float]()
    for one_machine, found in ((False, apart_s), (True, together_s)):
        setup = a_setup(rows, costs=costs, one_machine=one_machine)
        simulate(setup, None, lambda index, _, whole_s, found=found: found.update({index: whole_s}))
    more = 0.8 * costs.step_s([(1024, 0)]) + 0.01
    assert together_s[1] == pytest.approx(apart_s[1] + more)
    # While the prompt is read, two thirds of the usual steps are made.
    assert together_s[0] == pytest.approx(apart_s[0] + (costs.step_s([(1024, 0)]) + more) / 3)
    rows = apart([(0.0, 512, 20), (5.0, 100, 5)])
    together, alone = (simulate(a_setup(rows, costs=costs, one_machine=one_machine)) for one_machine in (True, False))
    assert together == alone, "a node that computes alone is as fast"


def test_equal_names_are_found_in_the_cache() -> None:
    rows = [TraceRow(float(index), 320, 4, tuple(range(20))) for index in range(4)]
    alone = simulate(a_setup(rows, prefill=0, decode=0, aggregated=1))
    # All but the last block: one token is always computed.
    assert alone.cached_tokens == 3 * 304
    assert alone.hit_rate == pytest.approx(0.7125)
    other = [TraceRow(row.arrival_s, 320, 4, tuple(range(20 * i, 20 * i + 20))) for i, row in enumerate(rows)]
    assert simulate(a_setup(other, prefill=0, decode=0, aggregated=1)).cached_tokens == 0


def test_what_does_not_fit_waits_and_what_can_never_fit_fails() -> None:
    rows = apart([(0.0, 700, 200), (0.0, 700, 200), (1.0, 5000, 10)])
    report = simulate(a_setup(rows, prefill=0, decode=0, aggregated=1, costs=node_costs(blocks=70)))
    assert (report.served, report.failed) == (2, 1)
    assert report.e2e_ms is not None
    assert report.e2e_ms.max > 1.5 * report.e2e_ms.p50 / 2, "the second waits for the blocks of the first"


def test_a_crowd_is_refused_as_the_router_refuses() -> None:
    rows = apart([(0.0, 100, 10)] * 1500)
    report = simulate(a_setup(rows, prefill=0, decode=0, aggregated=1, costs=node_costs(blocks=20)))
    assert report.refusals == {"overloaded": report.refused}
    assert report.served + report.refused == 1500
    assert report.refused > 0


def test_attainment_is_the_share_of_requests_within_their_limits() -> None:
    rows = apart([(0.0, 1024, 4), (0.0, 1024, 4), (5.0, 1024, 4)])
    costs = node_costs()
    limit = costs.request.arrive_s + 1.5 * costs.step_s([(1024, 0)])
    report = simulate(a_setup(rows, slo=ServiceLevel(ttft=limit), max_num_batched_tokens=1024))
    assert report.attainment == pytest.approx(2 / 3), "the second waits until the first was read"


SLOW = node_costs(prefill_ticks=65536)  # about 0.3 s for a prompt of 512


def test_pools_grow_and_shrink_with_the_load() -> None:
    """By the product's own autoscaler: a quiet time, a busy one that one node cannot serve, a quiet one."""
    limits = PoolConfig(nodes=1, min=1, max=4)
    busy = apart([(20.0 + 0.2 * index, 512, 8) for index in range(300)])
    rows = [*apart([(2.0, 100, 8)]), *busy, *apart([(85.0 + 15.0 * index, 100, 8) for index in range(120)])]
    report = simulate(a_setup(rows, prefill=limits, costs=SLOW))
    sizes = [change.size for change in report.changes if change.role == "prefill"]
    assert max(sizes) > 1
    assert sizes[-1] == 1
    assert all(change.why.startswith("prefill: from") for change in report.changes)
    assert sum(load.role == "prefill" for load in report.nodes) == max(sizes)
    crowded = a_setup(apart([(0.2 * index, 512, 8) for index in range(200)]), prefill=limits, costs=SLOW)
    report = simulate(msgspec.structs.replace(crowded, machines=2))
    assert sum(load.role == "prefill" for load in report.nodes) == 1, "all machines are taken"


def test_a_cluster_that_answers_nothing_is_refused() -> None:
    for prefill, words in ((0, "at least 1 node"), (1, "without a decode node")):
        with pytest.raises(ConfigurationError, match=words):
            simulate(a_setup(apart([(0.0, 10, 1)]), prefill=prefill, decode=0))


def test_an_error_of_a_part_ends_the_run() -> None:
    """An answer without the request that broke would be wrong, and one that waits for it never comes."""
    rows = [TraceRow(0.0, 32, 4, (2**40, 1)), *apart([(1.0, 100, 10)])]
    setup = msgspec.structs.replace(a_setup(rows), traffic=PlayedTraffic(rows, 16))
    with pytest.raises(ExceptionGroup) as broken:
        simulate(setup)
    assert broken.group_contains(OverflowError)


def test_an_interrupt_leaves_no_task_that_complains_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    rows = [TraceRow(0.1 * index, 500, 50) for index in range(40)]
    with pytest.raises(KeyboardInterrupt):
        simulate(a_setup(rows), on_answer=interrupted)
    gc.collect()
    assert complaints == []


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set(timers: list[tuple[int, bool]]) -> None:
    loop = VirtualLoop()
    ran: list[tuple[int, int]] = []
    handles = [loop.call_at(float(when), ran.append, (when, index)) for index, (when, _) in enumerate(timers)]
    for handle, (_, cancelled) in zip(handles, timers, strict=True):
        if cancelled:
            handle.cancel()
    loop.call_at(4.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert ran == sorted((when, index) for index, (when, cancelled) in enumerate(timers) if not cancelled)


def test_a_callback_that_fails_ends_the_run_with_its_error_and_so_does_waiting_for_what_never_happens() -> None:
    loop = VirtualLoop()
    ran: list[float] = []
    loop.call_at(1.0, [].pop)
    loop.call_at(2.0, ran.append, 2.0)
    with pytest.raises(IndexError):
        loop.run_forever()
    loop.close()
    assert ran == []
    loop = VirtualLoop()
    for _ in range(300):
        loop.call_at(1.0, loop.stop).cancel()
    with pytest.raises(InternalError, match="never happens"):
        loop.run_until_complete(loop.create_future())
    loop.close()


EXAMPLE = Path(__file__).parents[2] / "simulator" / "example.json"


def busy(report: SimulationReport) -> float:
    return sum(load.busy * load.seconds for load in report.nodes) / sum(load.seconds for load in report.nodes)


def test_a_batch_fills_what_is_idle_and_users_do_not_feel_it() -> None:
    """SmolLM2 on cores of a Xeon, two nodes of each role, 16 requests of up to 900 tokens in about 90 s."""
    draw = np.random.default_rng(3)
    arrivals = np.cumsum(draw.exponential(6.0, size=16))
    rows = [TraceRow(float(at), int(draw.integers(50, 900)), int(draw.integers(5, 60))) for at in arrivals]
    alone = a_setup(rows, prefill=2, decode=2, costs=read_costs(EXAMPLE))
    before = simulate(alone)
    beside = simulate(msgspec.structs.replace(alone, line=TraceRow(0.0, 400, 100)))
    assert (beside.served, beside.refused, beside.failed) == (16, 0, 0)
    assert beside.lines > 50
    assert (busy(beside) - busy(before)) / (1 - busy(before)) > 0.9
    assert before.ttft_ms is not None
    assert beside.ttft_ms is not None
    assert beside.ttft_ms.p99 < 1.05 * before.ttft_ms.p99
    assert before.itl_ms is not None
    assert beside.itl_ms is not None
    assert beside.itl_ms.p99 < 1.05 * before.itl_ms.p99


def traced(folder: Path, lengths: list[tuple[int, int]], *, num_blocks: int = 60) -> Path:
    lines: list[bytes] = []
    driver = Driver(num_blocks=num_blocks, caching=False, watcher=StepTrace("decode-0", lines.append))
    for number, (prompt, answer) in enumerate(lengths):
        driver.add(f"req-{number}", prompt=prompt, max_tokens=answer)
        if number % 2:
            driver.step()
    driver.run()
    half = next(index for index in range(len(lines) // 2, len(lines)) if b"step_snapshot" in lines[index])
    (folder / "decode-0.old.jsonl").write_bytes(b"".join(lines[:half]))
    (folder / "decode-0.jsonl").write_bytes(lines[0] + b"".join(lines[half:]))
    return folder / "decode-0.jsonl"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(2, 12)), min_size=1, max_size=12))
def test_every_request_is_there_with_its_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]]
) -> None:
    """In a pool that has to preempt, too."""
    file = traced(tmp_path_factory.mktemp("trace"), lengths, num_blocks=12)
    rows = rows_of_steps(TraceReader(file))
    assert sorted((row.input_tokens, row.output_tokens) for row in rows) == sorted(lengths)
    assert rows[0].arrival_s == 0.0
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)


def test_it_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "node.json"
    costs.write_bytes(msgspec.json.encode(node_costs()))
    file = traced(tmp_path, [(9, 4), (5, 3), (12, 2)])
    given_words = ["simulate", "--costs", str(costs), "--trace", str(file), "--aggregated", "1"]
    assert main([*given_words, "--prefill", "0", "--decode", "0", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["served"], report["prompt_tokens"], report["output_tokens"]) == (3, 26, 9)


PIN_S = 2.0


class Agents(_Simulation):
    """A cluster of that many prefill and decode nodes, with agents instead of recorded traffic."""

    def __init__(self, nodes: int = 2) -> None:
        costs = node_costs()
        config = TandemConfig(
            pools=PoolsConfig(prefill=PoolConfig(nodes=nodes), decode=PoolConfig(nodes=nodes)),
            scheduler=SchedulerConfig(policy=SchedulingPolicy.CONTINUUM, pin_seconds=PIN_S),
            cache=CacheConfig(block_size=16),
            router=RouterConfig(tokenizer_path="none", model_name="agents", local_prefill=LocalPrefill.NEVER),
        )
        super().__init__(SimulationSetup(config, dict.fromkeys(Role, costs), PlayedTraffic([])), None, None)
        self.decisions: list[str] = []
        self.places: list[str] = []
        self.cached: list[int] = []

    async def _arrive(self, requests: asyncio.TaskGroup, guard: asyncio.Task[None]) -> None:
        await asyncio.sleep(1.0)
        await self.work()
        guard.cancel()

    async def work(self) -> None:
        """What a test's agent does."""
        raise NotImplementedError

    def _on_submit(self, submit: Submit) -> None:
        times = AnswerTimes(self._loop.time(), len(submit.prompt_token_ids))
        self._outcome.live.setdefault(submit.request_id, times)

    async def turn(self, prompt: list[int], name: int, called: list[str], *, is_last_step: bool = False) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, seed=name)
        spec = SequenceSpec(
            "turn",
            RequestFacts(prompt_token_ids=prompt, sampling=sampling, job_id="j", is_last_step=is_last_step),
            self._loop.time() + 100,
        )
        generation = await self._dispatcher.generate([spec], "agents", eager=False)
        (life,) = generation.lives
        while not life.ended:
            await generation.news()
        assert life.error is None
        generation.turn_ended(called)
        self.decisions.append(life.decisions[-1].reason)
        self.places.append(life.decisions[-1].node_names)
        self.cached.append(life.cached_tokens or 0)
        await asyncio.sleep(0.01)
        return [*prompt, *life.ledger.tokens]

    def pinned(self) -> dict[str, int]:
        found = {node.info.node_id: node.scheduler.stats().pinned_requests for node in self.nodes}
        return {name: count for name, count in found.items() if count}

    @property
    def nodes(self) -> list[SimulatedNode]:
        return self._pools.nodes

    def used(self) -> int:
        for node in self.nodes:
            node.scheduler.schedule()
        every = [node.scheduler.stats() for node in self.nodes]
        return sum(stats.total_blocks - stats.free_blocks for stats in every)


def play(agents: Agents) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(agents.run())
    finally:
        loop.close()


def test_turns_are_pinned_on_both_nodes_and_go_back_there():
    class OneJob(Agents):
        async def work(self) -> None:
            text = [7] * 400
            for index in range(4):
                text = await self.turn(text, 10 + index, ["grep"])
                assert sorted(self.pinned().values()) == [1, 1]
                text += [100 + index] * 50
                await asyncio.sleep(0.5)
            await self.turn(text, 99, [], is_last_step=True)
            assert self.pinned() == {}
            assert self.used() == 0

    agents = OneJob()
    play(agents)
    assert len(set(agents.places)) == 1
    assert all("its job's last turn is there" in reason for reason in agents.decisions[1:])
    # The prefill node has each turn's prompt, but not its answer.
    assert agents.cached[0] == 0
    assert all(cached >= 400 for cached in agents.cached[1:])


def test_the_prefill_node_keeps_a_prompt_while_its_answer_is_written():
    class LongAnswer(Agents):
        async def work(self) -> None:
            turn = self._loop.create_task(self.turn([7] * 400, 10, ["grep"]))
            await asyncio.sleep(0.5)
            (name,) = self.pinned()
            assert name.startswith("prefill")
            await turn
            assert len(self.pinned()) == 2

    play(LongAnswer())


def test_a_slow_tool_is_pinned_nowhere_once_it_is_known():
    class Slow(Agents):
        async def work(self) -> None:
            text = await self.turn([7] * 400, 10, ["test"])
            assert len(self.pinned()) == 2
            await asyncio.sleep(20)
            text = await self.turn([*text, *[8] * 50], 11, ["test"])
            assert self.pinned() == {}
            await self.turn([*text, *[9] * 50], 12, ["grep"])
            assert len(self.pinned()) == 2
            await asyncio.sleep(PIN_S)
            assert self.used() == 0

    play(Slow(nodes=1))  # each node learns for itself
