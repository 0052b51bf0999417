"""A run of steps that is simulated at once leaves the scheduler as single steps do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import BesideCost, CostTable, DecodeRun
from tandem.simulator.simulation import simulate
from tandem.wire.nodes import Role
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.simulator.worlds import TICK, a_setup, node_costs

BLOCK = 4


def a_scheduler(num_blocks: int, window: int | None, caching: bool) -> Scheduler:
    groups = [KVCacheGroup(AttentionKind.FULL, BLOCK, (0,))]
    if window is not None:
        groups.append(KVCacheGroup(AttentionKind.SLIDING, BLOCK, (1,), window))
    return Scheduler(
        SchedulerConfig(max_num_batched_tokens=64),
        CacheConfig(block_size=BLOCK, prefix_caching=caching, hash_seed="tests"),
        groups,
        num_blocks,
        200,
        clock=lambda: 0.0,
    )


STEP_S = 0.5


def one_step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    requests = scheduler.requests
    sampled = {
        name: [requests[name].all_token_ids[-1]]
        for name in plan.num_scheduled_tokens
        if requests[name].num_computed_tokens == requests[name].num_tokens
    }
    scheduler.took(plan, STEP_S)
    scheduler.update_from_output(plan, ModelOutput(sampled))


def all_of(scheduler: Scheduler) -> object:
    state = scheduler.state
    cache, pool = state.cache, state.cache.pool
    return (
        [(r.request_id, r.status, r.num_computed_tokens, r.num_tokens, r.all_token_ids, r.allocation_horizon) for r in state.running],
        [cache.block_ids(name) for name in state.requests], list(pool.free_queue), pool.hashes,
        list(pool.ref_counts), state.settled, state.finished_req_ids, scheduler.stats(),
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=6),
    at_once=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_blocks=st.integers(12, 120),
    window=st.sampled_from([None, 6]),
    caching=st.booleans(),
)
def test_a_scheduler_is_left_as_by_single_steps(
    requests: list[tuple[int, int, int]], at_once: list[int], num_blocks: int, window: int | None, caching: bool
) -> None:
    together, alone = (a_scheduler(num_blocks, window, caching) for _ in range(2))
    for scheduler in (together, alone):
        for index, (prompt, answer, text) in enumerate(requests):
            sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
            request = made_request(f"r{index}", [text] * prompt, sampling, arrival_time=float(index))
            if prompt + answer < scheduler.max_model_len:
                scheduler.add_request(request)
    for wanted in at_once:
        one_step(together)
        one_step(alone)
        steps = min(together.num_unchanged_steps(), wanted)
        if steps:
            together.take_unchanged_steps(steps, steps * STEP_S)
            for _ in range(steps):
                one_step(alone)
        assert all_of(together) == all_of(alone)
        together.check_integrity()


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 90),
    context=st.integers(0, 3000),
    steps=st.integers(1, 2500),
    places=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_a_run_of_steps_takes_what_its_steps_take(size: int, context: int, steps: int, places: list[float]) -> None:
    costs = node_costs()
    run = DecodeRun(costs, size, context * size, steps)
    ends = [0.0]
    for step in range(steps):
        ends.append(ends[-1] + costs.step_s([], size, (context + step) * size))
    for place in places:
        count = int(place * steps)
        assert run.seconds(count) == pytest.approx(ends[count], rel=1e-9)
        between = (ends[count] + ends[min(count + 1, steps)]) / 2
        assert run.ended_by(between) == count
    assert sum(count for _, _, count in run.gaps(0, steps)) == steps


SOME_ROWS = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.integers(1, 900), st.integers(1, 300), st.lists(st.integers(0, 3), max_size=20)),
    min_size=1, max_size=12,
)  # fmt: skip


NUMBERS = st.floats(0.0, 100.0)
SECONDS = st.floats(0.001, 1.0)


@given(
    st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=1, max_size=3),
    st.tuples(st.floats(1.0, 100.0), NUMBERS),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
)
def test_no_step_within_a_size_and_a_context_takes_longer_than_the_most(
    seconds: list[list[float]], most: tuple[float, float], share: tuple[float, float]
) -> None:
    table = CostTable([2.0, 16.0, 64.0][: len(seconds)], [0.0, 10.0, 50.0], seconds)
    size, context = 1.0 + share[0] * (most[0] - 1.0), share[1] * most[1]
    assert table.at(size, context) <= table.most(*most) * (1 + 1e-9) + 1e-9


CORES = [frozenset("ab"), frozenset("a")]


@settings(max_examples=12, deadline=None)
@given(
    rows=SOME_ROWS,
    nodes=st.sampled_from([(1, 1, 0), (2, 1, 0), (1, 2, 0), (0, 0, 1), (0, 0, 2)]),
    blocks=st.sampled_from([90, 400]),
    shares=st.sampled_from(["nothing", "a machine", "cores"]),
)
def test_a_cluster_answers_as_by_single_steps(
    rows: list[tuple[int, int, int, list[int]]], nodes: tuple[int, int, int], blocks: int, shares: str
) -> None:
    """Whole results: the router receives the same messages, so that everything after it is the same, too."""
    traffic = sorted(
        # A step takes whole ticks. With a fraction of its own none comes at the end of a step, and two nodes that begin with two of them
        # never end a step at the same moment: which of the two is first then is not said.
        (
            TraceRow((at + (2 * index + 1) / 32) * TICK, prompt, answer, tuple(names))
            for index, (at, prompt, answer, names) in enumerate(rows)
        ),
        key=lambda row: row.arrival_s,
    )
    prefill, decode, aggregated = nodes
    # So does KV on its way: the decode node's steps begin with what came from a prefill node, and more comes from there.
    costs = msgspec.structs.replace(
        node_costs(blocks=blocks, max_model_len=1400),
        kv_bytes_per_token=1025.0,
        beside=BesideCost(prefill=1.3, prefill_step_s=0.004, decode=1.1),
    )
    reports = [
        simulate(
            a_setup(
                traffic,
                prefill=prefill,
                decode=decode,
                aggregated=aggregated,
                costs=costs,
                slo=ServiceLevel(ttft=0.1, itl=0.0085),
                by_steps=by_steps,
                one_machine=shares == "a machine",
                cores=dict.fromkeys(Role, CORES) if shares == "cores" else None,
            )
        )
        for by_steps in (False, True)
    ]
    together, alone = (rounded(msgspec.to_builtins(report)) for report in reports)
    assert together == alone


def rounded(value: object) -> object:
    """Sums in another order differ in their last digits."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items() if name != "itl_ms"}
    return [rounded(part) for part in value] if isinstance(value, list) else value
