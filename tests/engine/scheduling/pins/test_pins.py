"""Continuum: a turn keeps its blocks while a quick tool runs, one pin for each job, never past its time, and never at the price of
a request that could not run otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import InternalError
from tandem.engine.config import SchedulingPolicy
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.pins.pins import Pin, Pins
from tandem.engine.scheduling.pins.tools import ToolTimes
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorOutput
from tandem.node.step_trace.records import StepTrace
from tests.engine.scheduling.driving import Driver, FakeConnector, produce, unique_tokens

LIMIT_S = 2.0


class Agents(Driver):
    """A driver under continuum whose clock is set by hand."""

    def __init__(self, *, connector: FakeConnector | None = None, **options: object) -> None:
        self.now = 0.0
        options = {"policy": SchedulingPolicy.CONTINUUM, "pin_seconds": LIMIT_S, "num_blocks": 31, **options}
        super().__init__(connector=connector, clock=lambda: self.now, **options)  # type: ignore[arg-type]

    def turn(self, request_id: str, prompt: int | list[int] = 16, **fields: object) -> Request:
        """One turn of a job, from its arrival to its end."""
        fields.setdefault("job_id", request_id[0])
        request = self.add(request_id, prompt, **fields)  # type: ignore[arg-type]
        self.run()
        return request

    def next_turn(self, request_id: str, of: Request, **fields: object) -> Request:
        return self.turn(request_id, [*of.all_token_ids, *unique_tokens(request_id, 5)], **fields)

    @property
    def pins(self) -> Pins:
        assert isinstance(self.scheduler.state.pins, Pins)
        return self.scheduler.state.pins

    @property
    def pinned(self) -> list[str]:
        return list(self.pins.by_job)

    def at(self, seconds: float) -> None:
        self.now = seconds
        self.step()

    def step_and_look_at_pins(self) -> None:
        self.step()
        for pin in self.pins.by_job.values():
            assert self.now < pin.until <= self.now + LIMIT_S

    @property
    def used(self) -> int:
        stats = self.scheduler.stats()
        return stats.total_blocks - stats.free_blocks


# --- which turns are pinned: the four gates


def test_a_turn_that_is_not_the_last_keeps_its_blocks_until_the_time_is_over():
    driver = Agents()
    driver.turn("a1")
    assert driver.pinned == ["a"]
    assert driver.used == 5
    stats = driver.scheduler.stats()
    assert (stats.pinned_requests, stats.pinned_blocks) == (1, 5)
    assert driver.scheduler.seconds_until_sweep() == LIMIT_S
    driver.at(LIMIT_S - 0.01)
    assert driver.pinned == ["a"]
    driver.at(LIMIT_S)
    assert driver.pinned == []
    assert driver.used == 0
    assert driver.scheduler.stats().pins_ended == {"time": 1}
    assert driver.scheduler.seconds_until_sweep() is None


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        pytest.param({}, {"is_last_step": True}, id="last"),
        pytest.param({}, {"job_id": None}, id="no job"),
        pytest.param({}, {"max_tokens": 1, "prompt": 2}, id="no block"),
        pytest.param({"caching": False}, {}, id="no prefix cache"),
        pytest.param({"policy": "fcfs"}, {}, id="fcfs"),
        pytest.param({"policy": "priority"}, {}, id="priority"),
    ],
)
def test_what_gets_no_pin(options, fields):
    driver = Agents(**options)
    driver.turn("a1", **fields)
    assert driver.used == 0
    assert driver.scheduler.seconds_until_sweep() is None
    driver.scheduler.turn_ended("a", "a1", ["grep"])
    driver.scheduler.end_pins()


# --- one pin for each job


def test_the_next_turn_takes_the_place_of_the_pin_before():
    driver = Agents()
    first = driver.turn("a1")
    second = driver.next_turn("a2", first)
    assert second.num_cached_tokens == 16
    assert driver.pinned == ["a"]
    assert driver.used == 7  # of the second alone: what both share is there once
    assert driver.scheduler.stats().pins_ended == {"next_turn": 1}
    assert driver.scheduler.stats().pins_met == 1


def test_the_wait_in_line_gets_as_long_again():
    driver = Agents()
    first = driver.turn("a1")
    driver.now = 1.9
    driver.add("a2", [*first.all_token_ids, 1, 2, 3], job_id="a")
    assert driver.scheduler.seconds_until_sweep() == LIMIT_S


def test_turns_that_do_not_continue_each_other_are_not_pinned():
    driver = Agents()
    driver.turn("a1")
    driver.add("a2", 16, job_id="a")
    assert driver.pinned == []
    driver.run()
    assert driver.pinned == []
    assert driver.scheduler.stats().pins_ended == {"other_prompt": 1}
    third = driver.turn("a3")
    assert driver.pinned == []
    driver.next_turn("a4", third)
    assert driver.pinned == ["a"]  # they do again


# --- who goes first, and who gives way


def test_the_requests_of_pinned_jobs_go_first():
    driver = Agents(max_num_seqs=1)
    first = driver.turn("a1")
    driver.add("b1", 8, job_id="b")
    driver.add("c1", 8)
    driver.add("a2", [*first.all_token_ids, 1], job_id="a")
    step, _ = driver.step()
    assert list(step.num_scheduled_tokens) == ["a2"]
    driver.run()


def test_a_job_that_loses_its_pin_in_line_loses_its_place():
    driver = Agents(max_num_seqs=1)
    first = driver.turn("a1")
    driver.add("long", 8, max_tokens=40)
    driver.step()
    driver.add("b1", 8, job_id="b")
    driver.add("a2", [*first.all_token_ids, 1], job_id="a")
    driver.at(5.0)
    driver.abort("long")
    step, _ = driver.step()
    assert list(step.num_scheduled_tokens) == ["b1"]
    driver.run()


def test_a_running_request_of_a_pinned_job_is_not_the_victim_while_there_is_another():
    driver = Agents(num_blocks=16)
    first = driver.turn("a1", 16, max_tokens=2)
    other = driver.add("b1", 16, max_tokens=20)
    driver.step()
    own = driver.add("a2", [*first.all_token_ids, 1, 2], max_tokens=20, job_id="a")
    driver.run()
    assert (other.num_preemptions > 0, own.num_preemptions) == (True, 0)


def test_pins_give_way_when_nothing_could_run_otherwise():
    driver = Agents(num_blocks=12)
    driver.turn("a1", 16)
    driver.now = 0.5
    driver.turn("b1", 16)
    assert driver.pinned == ["a", "b"]
    driver.turn("c1", 16, job_id=None)
    assert driver.pinned == ["b"]  # the one that would have ended first
    assert driver.scheduler.stats().pins_ended == {"memory": 1}


def test_a_pin_gives_way_before_a_request_loses_its_own_blocks():
    driver = Agents(num_blocks=11)
    driver.turn("a1", 16)
    alone = driver.turn("b1", 14, max_tokens=16, job_id=None)
    assert alone.num_preemptions == 0
    assert driver.pinned == []


# --- what tools take


def test_a_tool_that_is_known_to_be_slow_ends_the_pin_when_it_is_named():
    driver = Agents()
    turn = driver.turn("a1")
    driver.scheduler.turn_ended("a", "a1", ["run_tests"])
    assert driver.pinned == ["a"]  # never seen
    driver.at(30.0)
    turn = driver.next_turn("a2", turn)
    driver.scheduler.turn_ended("a", "a2", ["run_tests"])
    assert driver.pinned == []
    assert driver.scheduler.stats().pins_ended["slow_tool"] == 1
    turn = driver.next_turn("a3", turn)
    driver.scheduler.turn_ended("a", "a3", ["grep"])
    assert driver.pinned == ["a"]


def test_a_word_about_a_turn_that_is_not_the_last_changes_nothing():
    driver = Agents()
    first = driver.turn("a1")
    driver.next_turn("a2", first)
    driver.scheduler.turn_ended("a", "a1", ["grep"])
    driver.scheduler.turn_ended("unknown", "x", None)
    assert driver.pinned == ["a"]


@pytest.mark.parametrize(("job_id", "request_id"), [("unknown", "x"), ("a", "a0"), ("a", "a1")])
def test_a_word_that_ends_no_pin_gives_the_scheduler_no_work(job_id: str, request_id: str):
    connector = FakeConnector()
    connector.keeps.add("h1")
    driver = Agents(connector=connector, num_blocks=8)
    driver.turn("a1")
    driver.at(LIMIT_S)  # its pin has ended
    driver.turn("h1")
    driver.add("b1", 16)
    driver.step()
    assert not driver.scheduler.has_work(), "the request waits for blocks that the connector holds"
    driver.scheduler.turn_ended(job_id, request_id, ["grep"])
    assert not driver.scheduler.has_work()


def test_a_word_that_comes_after_the_next_turn_changes_nothing():
    driver = Agents()
    first = driver.turn("a1")
    driver.scheduler.turn_ended("z", "z1", [])
    driver.now = 1.0
    driver.add("a2", [*first.all_token_ids, 1, 2], job_id="a")
    driver.scheduler.turn_ended("a", "a1", ["grep"])
    assert driver.scheduler.seconds_until_sweep() == LIMIT_S
    driver.run()
    assert driver.pins.times.expected(["grep"]) is None
    assert driver.pins.times.expected(None) is None


@pytest.mark.parametrize(("is_sent_away", "took"), [(False, 1.5), (True, 1.0)])
def test_a_tools_time_counts_from_the_answers_end(is_sent_away: bool, took: float):
    """A decode node writes the answer to a prompt that was sent away, so only the router's word says when that ended."""
    connector = FakeConnector()
    driver = Agents(connector=connector)
    turn = driver.turn("a1", 16, transfer=produce() if is_sent_away else None)
    driver.now = 0.5
    driver.scheduler.turn_ended("a", "a1", ["grep"])
    driver.now = 1.5
    driver.add("a2", [*turn.all_token_ids, 1], job_id="a")
    assert driver.pins.times.expected(["grep"]) == took


def test_a_pin_that_runs_out_teaches_that_the_tool_is_slow():
    driver = Agents()
    driver.turn("a1")
    driver.scheduler.turn_ended("a", "a1", ["deploy"])
    driver.at(LIMIT_S)
    driver.turn("b1")
    driver.scheduler.turn_ended("b", "b1", ["deploy"])
    assert driver.pinned == []


def test_without_names_turns_are_one_kind():
    """As where no router reads calls."""
    driver = Agents()
    turn = driver.turn("a1")
    driver.now = 10.0
    driver.next_turn("a2", turn)
    assert driver.pinned == []
    assert driver.used == 0


def test_a_router_that_says_nothing_of_one_turn_costs_the_others_no_pin():
    """As when it dies, or its client reads slowly."""
    driver = Agents()
    driver.turn("a1")
    driver.scheduler.turn_ended("a", "a1", ["grep"])
    driver.turn("b1")
    driver.at(2 * LIMIT_S)
    assert driver.pinned == []
    driver.turn("c1")
    assert driver.pinned == ["c"]


def test_the_trace_has_pins():
    lines: list[bytes] = []
    driver = Agents(watcher=StepTrace("n0", lines.append))
    driver.turn("a1")
    driver.turn("b1")
    snapshots = [record for line in lines if (record := json.loads(line))["event"] == "step_snapshot"]
    assert snapshots[0]["pinned"] == {}
    assert snapshots[-1]["pinned"]["a"] == 5


def test_tool_times():
    times = ToolTimes(LIMIT_S)
    assert times.expected(["grep"]) is None
    assert times.pin_s(["grep"]) == LIMIT_S
    times.took(["grep"], 0.5)
    assert times.expected(["grep"]) == 0.5
    times.took(["grep", "build"], 20.0)  # counts for the one that is not known
    assert times.expected(["grep"]) == 0.5
    assert times.expected(["build", "grep"]) == 20.0
    assert times.pin_s(["build", "grep"]) == 0.0
    assert times.pin_s([]) == LIMIT_S
    for _ in range(20):
        times.took(["build"], 1.0)
    assert times.pin_s(["build"]) == LIMIT_S


# --- with prefill and decode apart


def test_a_prefill_node_pins_when_the_prompt_is_sent_and_for_as_long_as_the_answer_takes():
    connector = FakeConnector()
    driver = Agents(connector=connector)
    connector.keeps.add("a1")
    driver.turn("a1", 16, max_tokens=1, transfer=produce())
    assert driver.pinned == []
    driver.step(ConnectorOutput(finished_sending={"a1"}))
    assert driver.pinned == ["a"]
    driver.at(30.0)
    assert driver.pinned == ["a"]
    driver.scheduler.turn_ended("a", "a1", ["grep"])
    assert driver.scheduler.seconds_until_sweep() == LIMIT_S
    driver.at(30.0 + LIMIT_S)
    assert driver.used == 0


# --- the end


PINNED_WRONGLY: dict[str, Callable[[Agents, Pin], object]] = {
    "a turn of another job": lambda driver, pin: driver.pins.by_job.__setitem__("b", driver.pins.by_job.pop("a")),
    "a turn that has not ended": lambda driver, pin: setattr(pin.request, "status", RequestStatus.PREEMPTED),
    "a job's last turn": lambda driver, pin: setattr(
        pin.request, "facts", msgspec.structs.replace(pin.request.facts, is_last_step=True)
    ),
    "a turn that a connector holds": lambda driver, pin: driver.scheduler.state.held.__setitem__("a1", pin.request),
}


@pytest.mark.parametrize("what", PINNED_WRONGLY)
def test_the_audit_notices_what_should_not_be_pinned(what: str):
    driver = Agents()
    driver.turn("a1")
    driver.scheduler.check_integrity()
    PINNED_WRONGLY[what](driver, driver.pins.by_job["a"])
    with pytest.raises(InternalError, match="is pinned"):
        driver.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("end", "later"),
    [(Scheduler.reset_prefix_cache, ["b"]), (Scheduler.end_pins, [])],
    ids=["a reset ends pins", "a node that closes has none and makes none"],
)
def test_what_ends_all_pins(end: Callable[[Scheduler], object], later: list[str]):
    driver = Agents()
    driver.turn("a1")
    end(driver.scheduler)
    assert driver.used == 0
    driver.turn("b1")
    assert driver.pinned == later


# --- in any order

EVENT = st.one_of(
    st.tuples(st.just("turn"), st.sampled_from("abcd"), st.booleans(), st.integers(1, 12)),
    st.tuples(st.just("other"), st.integers(4, 40)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 0.9, 2.5])),
    st.tuples(st.just("word"), st.sampled_from("abcd"), st.sampled_from([None, [], ["x"], ["y"]])),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


@given(st.lists(EVENT, max_size=40), st.integers(14, 31))
@settings(deadline=None, max_examples=60)
def test_whatever_happens(events, num_blocks):
    """One pin for each job, none past its time once a step has begun, no block lost, every request ends."""
    driver = Agents(num_blocks=num_blocks, max_num_seqs=3)
    last: dict[str, Request] = {}
    requests: list[Request] = []
    for number, event in enumerate(events):
        match event:
            case ("turn", job, is_last, tokens):
                before = last.get(job)
                begin = before.all_token_ids[:24] if before is not None else []
                prompt = [*begin, *unique_tokens(f"r{number}", 5)]
                last[job] = driver.add(f"r{number}", prompt, tokens, job_id=job, is_last_step=is_last)
                requests.append(last[job])
            case ("other", tokens):
                requests.append(driver.add(f"r{number}", min(tokens, 30), 3))
            case ("step", count):
                driver.steps(count)
            case ("pass", seconds):
                driver.now += seconds
                driver.step_and_look_at_pins()
            case ("word", job, tools):
                if job in last:
                    driver.scheduler.turn_ended(job, last[job].request_id, tools)
            case ("abort", which):
                if requests:
                    driver.abort(requests[which % len(requests)].request_id)
    driver.run()
    assert all(request.is_finished for request in requests)
    assert {request.status for request in requests} <= {
        RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED,
    }  # fmt: skip
    driver.at(driver.now + 2 * LIMIT_S)
    assert driver.used == 0
