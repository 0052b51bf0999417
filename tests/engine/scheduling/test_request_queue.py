"""The waiting queue: its order, removal from any place, and the cost of both."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.queue import RequestQueue, WaitingRequests, make_policy
from tandem.engine.scheduling.results import repeats
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.sampling import FinishReason, RepetitionDetection, SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import BLOCK, FULL, Driver, connected, produce, sent


def request(name: str, *, tokens: int = 3, priority: int = 0, arrival: float = 0.0) -> Request:
    return made_request(name, [1] * tokens, priority=priority, arrival_time=arrival)


def bury(queue: RequestQueue, victim: Request) -> None:
    victim.status = RequestStatus.FINISHED_ABORTED
    queue.bury(victim)


def drain(waiting: WaitingRequests) -> list[str]:
    names = []
    while (head := waiting.head()) is not None:
        names.append(head.request_id)
        waiting.take(head)
    return names


def waiting_with(policy: SchedulingPolicy, *requests: Request) -> WaitingRequests:
    waiting = WaitingRequests(make_policy(policy))
    for each in requests:
        waiting.add(each)
    return waiting


def test_requests_leave_by_key_then_by_arrival_and_those_that_ended_are_never_seen_again():
    queue = RequestQueue()
    requests = [request(str(i), tokens=i) for i in range(20)]
    for i in (*range(10, 20), *range(10)):
        queue.push((i // 2,), requests[i])
    ended = (0, 1, 7, 19, 3)
    for i in ended:
        bury(queue, requests[i])
    left = [i for i in range(20) if i not in ended]
    assert len(queue) == len(queue.requests()) == 15
    for place, i in enumerate(left):
        assert queue.num_tokens == sum(left[place:])
        assert queue.peek() is requests[i]
        assert queue.pop()[1] is requests[i]
    assert queue.peek() is None


def test_a_queue_of_mostly_dead_requests_shrinks():
    queue = RequestQueue()
    requests = [request(str(i), priority=77) for i in range(1000)]
    for i, each in enumerate(requests):
        queue.push((i,), each)
    shuffled = requests[1:]
    random.Random(0).shuffle(shuffled)
    for each in shuffled:
        bury(queue, each)
    del requests, shuffled, each
    assert sum(isinstance(each, Request) and each.facts.priority == 77 for each in gc.get_objects()) < 4
    assert queue.peek().request_id == "0"


def test_first_come_first_served_and_by_priority():
    waiting = waiting_with(SchedulingPolicy.FCFS, request("b", priority=9), request("a", priority=1))
    waiting.put_back(request("z"))  # a preempted one
    waiting.put_back(request("y"))
    assert drain(waiting) == ["y", "z", "b", "a"]
    named = [request("c", priority=1, arrival=1), *(request(name, priority=1) for name in "ba")]
    waiting = waiting_with(SchedulingPolicy.PRIORITY, *named)
    waiting.put_back(request("late", priority=1, arrival=5))
    waiting.put_back(request("urgent", priority=-1, arrival=9))
    assert drain(waiting) == ["urgent", "a", "b", "c", "late"]


def test_passed_over_requests_come_back_after_the_step_in_their_order():
    waiting = waiting_with(SchedulingPolicy.FCFS, *(request(name) for name in "abcd"))
    for _ in range(2):
        head = waiting.head()
        assert head is not None
        waiting.pass_over(head)
    assert waiting.head().request_id == "c"  # type: ignore[union-attr]
    waiting.end_step()
    assert drain(waiting) == ["a", "b", "c", "d"]


def test_a_blocked_request_keeps_its_place_among_the_passed_over():
    waiting = waiting_with(SchedulingPolicy.FCFS, *(request(name) for name in "abcd"))
    blocked = []
    for _ in range(3):
        head = waiting.head()
        assert head is not None
        waiting.block(head)
        head.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        blocked.append(head)
    for each in (blocked[2], blocked[0], blocked[1]):
        each.status = RequestStatus.WAITING
        waiting.wake(each)
    assert drain(waiting) == ["a", "b", "c", "d"]


def test_a_request_that_waits_for_an_event_from_the_start_stands_aside():
    early = request("early")
    early.status = RequestStatus.WAITING_FOR_GRAMMAR
    waiting = waiting_with(SchedulingPolicy.FCFS, early, request("b"))
    assert waiting.head().request_id == "b"  # type: ignore[union-attr]
    early.status = RequestStatus.WAITING
    waiting.wake(early)
    assert drain(waiting) == ["early", "b"]


def test_removal_from_every_place():
    waiting = waiting_with(SchedulingPolicy.FCFS, *(request(name) for name in "abcd"))
    a, b = waiting.head(), None
    assert a is not None
    waiting.block(a)
    b = waiting.head()
    assert b is not None
    for each in (a, b):
        each.status = RequestStatus.FINISHED_ABORTED
        waiting.remove(each)
    assert sorted(each.request_id for each in waiting) == ["c", "d"]
    assert drain(waiting) == ["c", "d"]


def test_the_least_urgent_holder_is_the_first_to_lose_its_blocks():
    for policy, loser in [(SchedulingPolicy.FCFS, "late"), (SchedulingPolicy.PRIORITY, "low")]:
        waiting = WaitingRequests(make_policy(policy))
        requests = [request("low", priority=5, arrival=1), request("late", arrival=9), request("head")]
        for each in requests:
            each.num_computed_tokens = 2
            waiting.add(each)
        found = waiting.least_urgent_holder(besides=requests[2])
        assert found is not None
        assert found.request_id == loser
        assert waiting.num_uncomputed_tokens == 3


def test_running_requests_are_served_in_order_of_admission_before_anybody_is_admitted():
    driver = Driver(max_num_batched_tokens=8)
    driver.add("b", prompt=4)
    driver.add("a", prompt=3)
    driver.step()
    driver.add("c", prompt=20)
    step, _ = driver.step()
    assert list(step.num_scheduled_tokens.items()) == [("b", 1), ("a", 1), ("c", 6)]


def test_the_chunk_cap_leaves_budget_to_others():
    driver = Driver(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    driver.add("long", prompt=15)
    driver.add("short", prompt=5)
    assert [driver.step()[0].num_scheduled_tokens for _ in range(3)] == [
        {"long": 6, "short": 5},
        {"long": 6, "short": 1},
        {"long": 3, "short": 1},
    ]


def test_the_last_position_of_the_context_is_never_an_input():
    driver = Driver(max_model_len=10)
    driver.add("a", prompt=5, max_tokens=100)
    driver.run()
    assert len(driver.outputs["a"]) == 5  # ten tokens in all, of which nine were computed
    assert driver.updates["a"][-1].finish == "length"


def test_a_context_configured_shorter_than_the_models_rules():
    scheduler = Scheduler(SchedulerConfig(max_model_len=50), CacheConfig(), (FULL,), 100, max_model_len=90)
    assert scheduler.max_model_len == 50
    assert Driver(max_model_len=90).scheduler.max_model_len == 90


def test_the_context_ends_where_the_whole_pool_does():
    driver = Driver(num_blocks=4, max_model_len=1000)  # three blocks that can be used
    driver.add("a", prompt=5, max_tokens=100)
    driver.run()
    assert len(driver.outputs["a"]) == 3 * BLOCK - 5
    assert driver.free_blocks == 3


def test_without_chunks_a_prompt_waits_until_it_fits_whole():
    driver = Driver(max_num_batched_tokens=30, max_model_len=31, chunked_prefill=False)
    driver.add("a", prompt=20)
    driver.add("b", prompt=15)
    driver.add("c", prompt=2)  # would fit, and waits its turn all the same
    assert [driver.step()[0].num_scheduled_tokens for _ in range(2)] == [{"a": 20}, {"a": 1, "b": 15, "c": 2}]


def test_without_chunks_a_budget_below_the_context_is_refused():
    with pytest.raises(ConfigurationError, match="chunked_prefill"):
        Driver(max_num_batched_tokens=30, max_model_len=32, chunked_prefill=False)


def test_there_is_work_until_the_runner_has_heard_of_every_end():
    driver = Driver()
    assert not driver.scheduler.has_work()
    driver.add("a", max_tokens=1)
    assert driver.scheduler.has_work()
    driver.step()
    assert not driver.scheduler.has_unfinished_requests()
    assert driver.scheduler.has_work()
    driver.step()
    assert not driver.scheduler.has_work()


def test_a_line_that_waits_for_held_blocks_is_no_work_until_they_are_free():
    driver, _ = connected(keeps=["a"], num_blocks=4)
    driver.add("a", prompt=10, max_tokens=1, transfer=produce())
    driver.steps(2)
    driver.add("b", prompt=10, max_tokens=1)
    assert driver.scheduler.has_work()
    driver.step()
    assert not driver.scheduler.has_work()
    driver.step(sent("a"))
    assert driver.scheduler.has_work()
    assert driver.step()[0].num_scheduled_tokens == {"b": 10}


WANTED = RepetitionDetection(max_pattern_size=3, min_pattern_size=1, min_count=3)


def by_definition(output: list[int], wanted: RepetitionDetection) -> bool:
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        end = output[-size * wanted.min_count :]
        if len(end) == size * wanted.min_count and end == end[:size] * wanted.min_count:
            return True
    return False


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    output=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    count=st.integers(2, 5),
)
def test_it_is_found_where_the_output_alone_has_it(
    prompt: list[int], output: list[int], sizes: tuple[int, int], count: int
) -> None:
    wanted = RepetitionDetection(max(sizes), min(sizes), count)
    assert repeats(prompt + output, len(output), wanted) == by_definition(output, wanted)


def said(driver: Driver, tokens: list[int], drafts: int = 0) -> tuple[list[int], FinishReason | None]:
    """What the request keeps when the model samples these tokens, one a step, or with drafts; and how it ended."""
    kept: list[int] = []
    finish: FinishReason | None = None
    while tokens and "a" in driver.scheduler.requests:
        count = 1 + (drafts if kept else 0)
        now, tokens = tokens[:count], tokens[count:]
        step = driver.schedule()
        now = now[: 1 + len(step.spec_token_ids.get("a", ()))]
        proposal = {"a": tokens[:drafts]} if drafts and tokens else {}
        for update in driver.book(step, ModelOutput({"a": now}, draft_token_ids=proposal)):
            kept += update.token_ids
            finish = update.finish
    return kept, finish


PAIRS = [5, 6, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8]


@pytest.mark.parametrize(
    ("sampling", "before", "drafts", "sampled", "kept"),
    [
        pytest.param({}, [], 0, PAIRS, PAIRS[:8], id="the answer ends with the last repetition"),
        pytest.param({}, [], 2, PAIRS, PAIRS[:8], id="also where tokens come as drafts"),
        pytest.param({"min_tokens": 7}, [], 0, [5] * 12, [5] * 7, id="not before the fewest tokens"),
        pytest.param({}, [7, 8, 7, 8, 7], 0, [8, 7, 8], [8], id="tokens that another node said count"),
        pytest.param({"max_tokens": 12, "repetition_detection": None}, [], 0, [5] * 12, [5] * 12, id="not asked for"),
    ],
)
def test_an_answer_that_repeats_itself_is_ended(
    sampling: dict[str, Any], before: list[int], drafts: int, sampled: list[int], kept: list[int]
) -> None:
    driver = Driver()
    asked = {"max_tokens": 40, "repetition_detection": WANTED, **sampling}
    driver.add("a", sampling=SamplingParams(**asked), output_token_ids=before)
    ended = FinishReason.STOP if asked["repetition_detection"] else FinishReason.LENGTH
    assert said(driver, sampled, drafts) == (kept, ended)
