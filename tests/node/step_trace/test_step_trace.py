"""The scheduler trace records every decision and changes none."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.node.step_trace.records import (
    PrefixCacheEvent,
    StepDecision,
    StepSnapshot,
    StepTrace,
    TraceHeader,
    TraceRecord,
)
from tests.engine.scheduling.driving import Driver, FakeConnector


class Traced:
    def __init__(self, **options: Any) -> None:
        self.lines: list[bytes] = []
        self.driver = Driver(watcher=StepTrace("n0", self.lines.append), **options)

    @property
    def records(self) -> list[TraceRecord]:
        return [msgspec.json.decode(line, type=TraceRecord) for line in self.lines]

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def test_a_step_is_a_snapshot_what_was_found_and_a_decision_under_one_number() -> None:
    traced = Traced(max_num_batched_tokens=8)
    traced.driver.add("a", prompt=6, max_tokens=2)
    traced.driver.step()
    header, snapshot, found, decision = traced.records
    assert isinstance(header, TraceHeader)
    assert (header.node_id, header.total_blocks, header.max_num_batched_tokens) == ("n0", 99, 8)
    assert snapshot.step == found.step == decision.step == 0
    assert [(one.request_id, one.status, one.computed) for one in snapshot.waiting] == [("a", "waiting", 0)]
    assert (found.request_id, found.local_tokens, found.external_tokens) == ("a", 0, 0)
    assert (decision.new, decision.num_scheduled_tokens, decision.token_budget) == (["a"], {"a": 6}, 2)
    traced.driver.run()
    assert [record.step for record in traced.of(StepDecision)] == [0, 1, 2]
    assert traced.of(StepDecision)[-1].finished == ["a"]


def test_a_preemption_is_told_with_the_request_that_it_was_for() -> None:
    traced = Traced(num_blocks=5, caching=False)
    traced.driver.add("a", prompt=7, max_tokens=5)
    traced.driver.add("b", prompt=7, max_tokens=5)
    traced.driver.run()
    [eviction] = [one for record in traced.of(StepDecision) for one in record.preempted]
    assert (eviction.request_id, eviction.for_request) == ("b", "a")
    assert eviction.blocks > 0
    assert eviction.computed >= 7
    assert [record.resumed for record in traced.of(StepDecision) if record.resumed] == [["b"]]


def test_what_keeps_the_next_in_line_waiting_is_told() -> None:
    traced = Traced(max_num_seqs=1)
    traced.driver.add("a", prompt=3)
    traced.driver.add("b", prompt=3)
    traced.driver.step()
    assert traced.of(StepDecision)[-1].held_back == "b"
    assert traced.of(StepDecision)[-1].why == "1 requests run, and no more may"
    full = Traced(num_blocks=5, caching=False)
    full.driver.add("a", prompt=12, max_tokens=1)
    full.driver.add("b", prompt=12, max_tokens=1)
    full.driver.step()
    assert (full.of(StepDecision)[-1].held_back, full.of(StepDecision)[-1].why) == ("b", "too few free blocks")


def test_a_load_is_told_when_it_begins() -> None:
    connector = FakeConnector()
    connector.offers["a"] = (8, True)
    traced = Traced(connector=connector)
    traced.driver.add("a", prompt=10)
    traced.driver.step()
    [found] = traced.of(PrefixCacheEvent)
    assert (found.external_tokens, found.arrives_later, found.connector) == (8, True, "FakeConnector")
    assert traced.of(StepDecision)[-1].loads == ["a"]
    before = len(traced.lines)
    for _ in range(5):
        traced.driver.scheduler.schedule()
    assert len(traced.lines) - before <= 2, "steps in which nothing happens are told once"


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=6),
    num_blocks=st.integers(12, 30),
    budget=st.integers(4, 40),
)
def test_a_traced_run_decides_as_an_untraced_one_and_the_trace_adds_up(
    requests: list[tuple[int, int]], num_blocks: int, budget: int
) -> None:
    traced = Traced(num_blocks=num_blocks, max_num_batched_tokens=budget)
    plain = Driver(num_blocks=num_blocks, max_num_batched_tokens=budget)
    for driver in (traced.driver, plain):
        for index, (prompt, most) in enumerate(requests):
            driver.add(f"r{index}", prompt=prompt, max_tokens=most)
        driver.run()
    assert traced.driver.outputs == plain.outputs
    decisions, stats = traced.of(StepDecision), traced.driver.scheduler.stats()
    snapshots = traced.of(StepSnapshot)
    assert [one.step for one in snapshots] == [one.step for one in decisions]
    assert sum(one.total_num_scheduled_tokens for one in decisions) == stats.tokens_scheduled
    assert sum(len(one.preempted) for one in decisions) == stats.preemptions
    assert sum(len(one.new) for one in decisions) == len(requests)
    for before, decision in zip(snapshots, decisions, strict=True):
        assert {one.request_id for one in before.running} >= set(decision.running)
        assert before.free_blocks + sum(one.blocks for one in before.running) >= 0
