"""A simulated cluster makes as many tokens as were asked for, at the times that the costs give, on the nodes that the router chose."""

from __future__ import annotations

import gc
import sys

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolConfig
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import BesideCost
from tandem.simulator.outcome import NodeLoad, SimulationReport
from tandem.simulator.simulation import simulate
from tandem.simulator.traffic import PlayedTraffic
from tests.simulator.worlds import a_setup, apart, node_costs


def load_of(report: SimulationReport, role: str) -> NodeLoad:
    (load,) = [load for load in report.nodes if load.role == role]
    return load


def test_a_lone_request_takes_what_its_parts_take() -> None:
    costs = node_costs()
    report = simulate(a_setup(apart([(0.0, 512, 5)]), costs=costs))
    reading = costs.step_s([(512, 0)])
    expected = costs.request.arrive_s + reading + costs.request.answer_s
    assert report.ttft_ms.p50 == pytest.approx(1e3 * expected)
    # The handover stands between the first token and the second, which the decode node's first step makes.
    handover = costs.transfer_s(512) + costs.transfer.handover_s
    steps = [costs.step_s([], 1, context) for context in range(512, 516)]
    assert report.tpot_ms.p50 == pytest.approx(1e3 * (handover + sum(steps)) / 4)
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
    first_ms = 2 * report.e2e_ms.p50 - report.e2e_ms.max
    assert report.e2e_ms.max > 1.5 * first_ms, "the second waits for the blocks of the first"


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
