"""The autoscaler, against simulated loads, and each of its rules alone."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.config import AutoscalingConfig, SloConfig
from tandem.cluster.pools.autoscaling.load_meter import LoadMeter
from tandem.cluster.pools.autoscaling.rules import LONG, Breach, PoolBounds, PoolLoad, decide
from tandem.cluster.tasks import cancel
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, NodeStatus
from tandem.wire.step_costs import ALONE, TERMS, StepCosts
from tests.cluster.pools.autoscaling.pool_simulation import PROMPT, READS_PER_S, Simulation
from tests.cluster.pools.helpers import in_loop, status_of

SLO = SloConfig(ttft_s=2.0, inter_token_s=0.1)
CONFIG = AutoscalingConfig(period_s=1.0, grow_after_s=5.0, shrink_after_s=20.0, settle_s=3.0)
LONG_S = round(LONG * CONFIG.shrink_after_s)
ONE_NODE_READS = READS_PER_S / PROMPT  # requests per second that one prefill node computes


async def pass_time(simulation: Simulation, seconds: int) -> None:
    autoscaler = asyncio.create_task(simulation.autoscaler.run())
    for _ in range(seconds):
        simulation.second()
        await simulation.clock.advance(1.0)
        assert not autoscaler.done(), autoscaler.exception()
    await cancel(autoscaler)


# --- whole loads


Load = tuple[float, float, int, int, int | None]
"""Requests in a second, seconds of an answer, prefill and decode nodes at first, and the seed of chance; None: even arrivals."""
LOADS = st.tuples(
    st.floats(0.5, 30.0), st.floats(2.0, 20.0), st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(0, 1000)
)


@pytest.mark.parametrize("load", [(26.0, 12.0, 1, 1, None), (3.0, 5.0, 3, 4, 7)])
async def test_under_a_steady_load_pools_find_their_size_and_stay(load: Load) -> None:
    await find_a_size(load)


@pytest.mark.more
@settings(max_examples=8, deadline=None)
@given(LOADS)
@in_loop
async def test_under_any_steady_load_pools_find_their_size_and_stay(load: Load) -> None:
    await find_a_size(load)


async def find_a_size(load: Load) -> None:
    """Random arrivals may show late that a pool is too small, but they never make its size swing."""
    requests_per_s, answer_s, prefill, decode, seed = load
    simulation = Simulation(
        lambda _: requests_per_s, answer_s=answer_s, seed=seed, prefill=(prefill, 1, 4), decode=(decode, 1, 4)
    )
    # After twenty minutes they know the load, and need no more than usual room.
    await pass_time(simulation, 1500)
    found, decided = simulation.sizes(), len(simulation.decisions)
    await pass_time(simulation, 600)
    for role in found:
        assert simulation.turns(role) <= 1, "it may have grown too far at first, and gone back once"
    if seed is not None:
        return
    assert (simulation.sizes(), len(simulation.decisions)) == (found, decided)
    reading = simulation.pools[Role.PREFILL]
    if found[Role.PREFILL] < reading.maximum:
        assert reading.waiting_tokens / (reading.size * READS_PER_S) < 2.0, "prompts are read in time"


async def test_a_load_that_grows_and_goes_takes_the_pools_up_and_down_again_once() -> None:
    def ramp(now: float) -> float:
        return max(0.2, 40 * min(now, 3600 - now) / 1800)

    simulation = Simulation(ramp)
    await pass_time(simulation, 1800)
    at_the_top = simulation.sizes()
    assert at_the_top[Role.PREFILL] >= 4
    assert at_the_top[Role.DECODE] >= 8
    await pass_time(simulation, 1800 + 2400)
    assert simulation.sizes() == {Role.PREFILL: 1, Role.DECODE: 1}
    assert simulation.turns(Role.PREFILL) == simulation.turns(Role.DECODE) == 1


async def test_bursts_that_come_again_and_again_are_expected() -> None:
    """Bursts of a minute, each after four quiet minutes."""
    simulation = Simulation(
        lambda at: 12.0 * ONE_NODE_READS / 4 if at % 300 >= 240 else 0.5 * ONE_NODE_READS,
        answer_s=4.0,
        seed=None,
        prefill=(1, 1, 8),
        decode=(4, 4, 4),
    )
    await pass_time(simulation, 1200)
    learned = simulation.turns(Role.PREFILL)
    await pass_time(simulation, 900)
    assert simulation.turns(Role.PREFILL) - learned <= 2
    assert simulation.sizes()[Role.PREFILL] >= 3, "it stays for the next one"


async def test_no_load_takes_a_pool_above_its_maximum() -> None:
    simulation = Simulation(lambda _: 10 * ONE_NODE_READS, prefill=(1, 1, 3), decode=(1, 1, 2))
    await pass_time(simulation, 600)
    assert simulation.sizes() == {Role.PREFILL: 3, Role.DECODE: 2}
    assert sorted(line.partition(": ")[2].partition(":")[0] for line in simulation.said) == [
        "2 are too few, and pools.decode.max allows no more",
        "3 are too few, and pools.prefill.max allows no more",
    ], "said once, not every second"


# --- each rule


def pool(role: Role = Role.DECODE, **fields: object) -> PoolBounds:
    given = {"wanted": 2, "min_nodes": 1, "max_nodes": 4, "is_settled": True, "is_waiting": False}
    return PoolBounds(role=role, **{**given, **fields})  # type: ignore[arg-type]


def loads(role: Role = Role.DECODE, seconds: int = 60, nodes: int = 2, **fields: float) -> list[PoolLoad]:
    return [
        PoolLoad(
            at=float(at),
            nodes=nodes,
            reads_prompts=role is not Role.DECODE,
            writes_tokens=role is not Role.PREFILL,
            **fields,
        )
        for at in range(seconds + 1)
    ]


def decided(pool: PoolBounds, history: list[PoolLoad], changed_at: float = 0.0, breaches: list[Breach] | None = None):
    known = {pool.role: breaches or []}
    return decide(history[-1].at, {pool.role: changed_at}, {pool.role: history}, [pool], known, SLO, CONFIG)


@pytest.mark.parametrize(
    ("role", "measured", "why"),
    [
        (Role.DECODE, {"blocks": 0.97}, "decode: from 2 to 3: 97% of its blocks are taken, more than 90%"),
        (
            Role.DECODE,
            {"step_s": 0.15},
            "decode: from 2 to 3: a token takes 150 ms, more than slo.inter_token_s (100 ms)",
        ),
        (
            Role.PREFILL,
            {"queue_s": 1.5, "busy": 1.0},
            "prefill: from 2 to 3: prompts wait 1.5 s, more than 1.0 s (50% of slo.ttft_s)",
        ),
        (
            Role.AGGREGATED,
            {"queue_s": 1.5},
            "aggregated: from 2 to 3: prompts wait 1.5 s, more than 1.0 s (50% of slo.ttft_s)",
        ),
        (
            Role.DECODE,
            {"blocks": 0.6, "step_s": 0.03, "wait_s": 1.2},
            "decode: from 2 to 3: requests wait 1.2 s for room, more than 1.0 s (50% of slo.ttft_s)",
        ),
        (Role.PREFILL, {"busy": 0.5, "wait_s": 9.0}, None),  # they wait for the other pool
        (Role.PREFILL, {"busy": 0.5}, None),
        (Role.PREFILL, {"busy": 0.03}, "prefill: from 2 to 1: in 60 s 1 would have been 6% loaded at most"),
    ],
)
def test_every_decision_says_why(role: Role, measured: dict[str, float], why: str | None) -> None:
    resize = decided(pool(role), loads(role, **measured))
    assert (resize.why if resize else None) == why


async def test_requests_that_wait_in_routers_make_the_pool_grow_that_writes_answers() -> None:
    """The decode nodes are at their limit of requests, although they report spare time and free blocks."""
    simulation = Simulation(lambda _: 2.0, seed=None)
    await pass_time(simulation, 60)
    assert simulation.decisions == []
    simulation.router_wait_s = 3.0
    await pass_time(simulation, 60)
    (_, resize, before), *_ = simulation.decisions
    assert (resize.role, before) == (Role.DECODE, 1)
    assert "requests wait 3.0 s for room" in resize.why
    simulation.router_wait_s = 0.0
    await pass_time(simulation, 600)
    assert simulation.turns(Role.DECODE) <= 1


def status(**fields: float) -> NodeStatus:
    return status_of("d", Role.DECODE, **{"free_blocks": 50, "running": 1, **fields})


def test_requests_wait_in_nodes_or_in_routers() -> None:
    meter = LoadMeter(10)
    waits = []
    for in_node, in_router in ((0.0, 0.0), (4.0, 0.0), (4.0, 7.0)):
        meter.look(1.0, [status(oldest_wait_s=in_node)], in_router)
        waits.append(meter.history[Role.DECODE][-1].wait_s)
    assert waits == [0.0, 4.0, 7.0]


def test_one_long_prompt_that_is_being_read_is_no_line() -> None:
    """It is computed by one node, however many the pool has: only those behind it could go to others."""
    meter = LoadMeter(10)
    queues = []
    for at, waiting in ((1.0, 0), (2.0, 0), (3.0, 1)):
        counters = NodeCounters(steps=int(at), step_seconds=at, prompt_tokens_computed=int(5000 * at))
        reads = msgspec.structs.replace(status(waiting_tokens=60_000), role=Role.PREFILL, counters=counters)
        meter.look(at, [reads, msgspec.structs.replace(reads, node_id="p", waiting=waiting)])
        queues.append(meter.history[Role.PREFILL][-1].queue_s)
    assert queues == pytest.approx([0.0, 0.0, 6.0])


def test_what_runs_when_nothing_else_does_is_no_load() -> None:
    meter = LoadMeter(10)
    users = {"steps": 20, "step_seconds": 2.0, "output_tokens": 60}
    both = {"steps": 100, "step_seconds": 9.5, "output_tokens": 700}
    apart = {"idle_steps": 80, "idle_seconds": 7.5, "idle_tokens_read": 2000, "idle_tokens_written": 640}
    found = []
    for counters, fields in ((users, {}), ({**both, **apart}, {"free_blocks": 5, "idle_blocks": 45})):
        meter.look(1.0, [status()])
        now = msgspec.structs.replace(status(**fields), counters=NodeCounters(**counters))  # type: ignore[arg-type]
        meter.look(11.0, [now])
        found.append(meter.history[Role.DECODE][-1])
    assert found[0] == found[1]
    assert (found[0].busy, found[0].step_s, found[0].written_per_s) == (0.2, 0.1, 6.0)


def test_a_prompt_that_a_node_reads_while_it_writes_nothing_makes_no_token_slow() -> None:
    """Routers send prompts to decode nodes that are idle. A pool that grew by that had still more idle nodes, up to its maximum."""
    meter = LoadMeter(10)
    first = NodeCounters()
    reading = NodeCounters(steps=3, step_seconds=0.96, prompt_tokens_computed=5000)
    then_one_answer = NodeCounters(
        steps=18, step_seconds=1.9, prompt_tokens_computed=7000, output_tokens=14, decode_steps=14, decode_seconds=0.56
    )
    beside_answers = NodeCounters(
        steps=21, step_seconds=2.8, prompt_tokens_computed=9000, output_tokens=20, decode_steps=14, decode_seconds=0.56
    )
    seen = []
    for now, counters in enumerate((first, reading, then_one_answer, beside_answers)):
        meter.look(float(now), [msgspec.structs.replace(status(), counters=counters)])
        seen.append(meter.history[Role.DECODE][-1].step_s)
    assert seen == pytest.approx([0.0, 0.0, 0.04, 0.3])


def test_what_a_decode_pool_computes_all_the_time_and_a_moment_are_no_reason() -> None:
    assert decided(pool(wanted=2), loads(seconds=LONG_S, busy=1.0, blocks=0.1)).size == 1
    history = loads(blocks=0.5)
    history[-2:] = [PoolLoad(load.at, 2, False, True, blocks=0.99) for load in history[-2:]]
    assert decided(pool(), history) is None


def test_only_an_idle_pool_shrinks_before_its_load_is_known_for_long() -> None:
    half = {"blocks": 0.2}  # 0.44 nodes' worth
    assert decided(pool(wanted=8, max_nodes=8), loads(nodes=8, blocks=0.01)).size == 4, (
        "at most half of it goes at once"
    )
    assert decided(pool(), loads(**half)) is None
    assert decided(pool(), loads(seconds=LONG_S, **half)).size == 1
    busy_once = [*loads(blocks=0.5)[:20], *loads(seconds=LONG_S, **half)[20:]]
    assert decided(pool(), busy_once) is None, "though that was three minutes ago"
    other_size = [msgspec.structs.replace(load, nodes=4, blocks=0.1) for load in loads(seconds=LONG_S, **half)[:-30]]
    history = [*other_size, *loads(seconds=LONG_S, **half)[-30:]]
    assert decided(pool(), history, changed_at=LONG_S - 25.0).size == 1, "a change of the pool is none of its load"
    assert decided(pool(), history, changed_at=LONG_S - 15.0) is None, "but has to show itself first"


def test_what_a_step_takes_for_any_number_of_requests_is_no_load() -> None:
    """Nor is a prompt that a decode node reads because it has nothing to do."""
    costs = StepCosts(tuple(0.03 if term == ALONE else 0.0 for term in range(TERMS)), rows_seen=9)
    before = NodeCounters(step_costs=costs)
    both = {"steps": 10, "step_seconds": 0.9, "decode_steps": 9, "decode_seconds": 0.36, "output_tokens": 18}
    meter = LoadMeter(10)
    for now, counters in ((0.0, before), (2.0, NodeCounters(step_costs=costs, **both))):  # type: ignore[arg-type]
        writer = msgspec.structs.replace(status(free_blocks=100), counters=counters)
        meter.look(now, [writer, msgspec.structs.replace(status(), node_id="p", role=Role.PREFILL)])
    (_, load) = meter.history[Role.DECODE]
    assert (load.step_s, load.answering_s, load.fixed_s) == pytest.approx((0.09, 0.04, 0.03))
    history = [msgspec.structs.replace(load, at=float(at), nodes=2) for at in range(LONG_S + 1)]
    resize = decided(pool(), history)
    assert resize.why == "decode: from 2 to 1: in 200 s 1 would have been 32% loaded at most"
    unknown = [msgspec.structs.replace(load, fixed_s=0.0) for load in history]
    assert decided(pool(), unknown) is None


@pytest.mark.parametrize(("nodes", "size"), [(8, 4), (4, 3), (3, None)])
def test_what_requests_add_to_the_steps_is_the_same_on_any_number_of_nodes(nodes: int, size: int | None) -> None:
    """On fewer nodes each has more requests, and these stay longer because steps are longer. Together they add a second of work each second;
    two nodes would write with 60 ms a token, which is 71% of what they can at 100 ms."""
    fixed_s, added = 0.03, 1.0
    step_s = fixed_s / (1 - added / nodes)
    history = loads(nodes=nodes, seconds=LONG_S, step_s=step_s, fixed_s=fixed_s, busy=1.0)
    resize = decided(pool(wanted=nodes, max_nodes=8), history)
    assert (resize.size if resize else None) == size


def test_nothing_is_decided_while_something_changes_or_has_just_changed() -> None:
    crowded = loads(blocks=0.99)
    assert decided(pool(is_settled=False), crowded) is None
    assert decided(pool(is_waiting=True), crowded) is None
    just = crowded[-1].at - CONFIG.settle_s - CONFIG.grow_after_s + 2
    assert decided(pool(), crowded, changed_at=just) is None
    assert decided(pool(), crowded, changed_at=just - 3) is not None


def test_the_greatest_need_comes_first() -> None:
    history = {Role.PREFILL: loads(Role.PREFILL, queue_s=1.2), Role.DECODE: loads(Role.DECODE, step_s=0.19)}
    resize = decide(60.0, dict.fromkeys(Role, 0.0), history, [pool(Role.PREFILL), pool(Role.DECODE)], {}, SLO, CONFIG)
    assert resize.role is Role.DECODE


@pytest.mark.parametrize(
    ("queue_s", "most", "size"), [(1.01, 20, 7), (1.3, 20, 8), (1.5, 20, 9), (5.0, 20, 12), (5.0, 7, 7)]
)
def test_a_pool_grows_as_far_as_it_misses_its_target_and_doubles_at_most(queue_s: float, most: int, size: int) -> None:
    """A second growth would come a minute later: the new nodes start, and then have to be too few for a while."""
    crowded = loads(Role.PREFILL, nodes=6, queue_s=queue_s)
    assert decided(pool(Role.PREFILL, wanted=6, max_nodes=most), crowded).size == size


def test_a_line_that_becomes_longer_counts_as_it_is_now() -> None:
    crowded = [msgspec.structs.replace(load, queue_s=1 + load.at / 60) for load in loads(Role.PREFILL, nodes=6)]
    assert decided(pool(Role.PREFILL, wanted=6, max_nodes=20), crowded).size == 12


@pytest.mark.parametrize(("role", "measure"), [(Role.PREFILL, "queue_s"), (Role.DECODE, "wait_s")])
def test_a_pool_stays_as_it_is_by_a_wait_that_would_make_it_grow_and_by_no_shorter_one(
    role: Role, measure: str
) -> None:
    def waited(seconds: int) -> list[PoolLoad]:
        history = loads(role, seconds=LONG_S, blocks=0.1)
        history[50 : 50 + seconds] = [
            msgspec.structs.replace(load, **{measure: 1.8}) for load in history[50 : 50 + seconds]
        ]
        return history

    assert decided(pool(role), waited(2)).size == 1
    assert decided(pool(role), waited(round(CONFIG.grow_after_s))) is None


def test_a_size_that_proved_too_small_is_not_tried_again_under_the_same_load() -> None:
    calm = loads(seconds=LONG_S, blocks=0.2)  # 0.44 nodes' worth: one node could do it by that measure
    assert decided(pool(), calm).size == 1
    assert decided(pool(), calm, breaches=[Breach(nodes=1, demand=0.5)]) is None
    assert decided(pool(), calm, breaches=[Breach(nodes=1, demand=0.9)]).size == 1


def test_nodes_that_write_what_fewer_could_not_are_not_idle() -> None:
    """A step with fewer answers is shorter, so two nodes look as if one were enough."""
    slow = loads(nodes=1, step_s=0.2, written_per_s=800.0)
    growth = decided(pool(wanted=1), slow)
    assert (growth.size, growth.breach) == (2, Breach(1, pytest.approx(2.0), 800.0))
    calm = loads(seconds=LONG_S, step_s=0.02, written_per_s=790.0)
    assert decided(pool(), calm).size == 1, "0.4 nodes' worth, by its steps"
    assert decided(pool(), calm, breaches=[Breach(1, 2.0, 800.0)]) is None
    assert (
        decided(pool(), loads(seconds=LONG_S, step_s=0.02, written_per_s=600.0), breaches=[Breach(1, 2.0, 800.0)]).size
        == 1
    )


SHARES = st.floats(0.0, 1.0)


@given(
    st.lists(st.builds(PoolLoad, st.just(0.0), st.integers(1, 9), st.booleans(), st.booleans(),
                       st.floats(0, 100), SHARES, SHARES, st.floats(0, 2)), min_size=1, max_size=40),
    st.sampled_from([Role.PREFILL, Role.DECODE]), st.integers(1, 9), st.integers(0, 4), st.integers(0, 9),
    st.lists(st.builds(Breach, st.integers(1, 9), st.floats(0, 10))),
)  # fmt: skip
def test_whatever_is_measured_limits_are_kept_and_a_breach_is_remembered_with_its_size(
    measured: list[PoolLoad], role: Role, wanted: int, minimum: int, more: int, breaches: list[Breach]
) -> None:
    history = [msgspec.structs.replace(load, at=float(at)) for at, load in enumerate(measured, 10)]
    asked = pool(role, wanted=wanted, min_nodes=minimum, max_nodes=max(1, minimum) + more)
    resize = decided(asked, history, breaches=breaches)
    if resize is None:
        return
    if resize.size > wanted:
        assert resize.size <= asked.max_nodes
        assert resize.breach.nodes == wanted
    else:
        assert max(1, minimum, wanted / 2) <= resize.size < wanted
        assert resize.breach is None
