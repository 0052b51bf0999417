"""The waiting queue: its order, removal from any place, and the cost of both."""

from __future__ import annotations

import gc
import random

from tandem.engine.config import SchedulingPolicy
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.queue import RequestQueue, WaitingRequests, make_policy
from tests.engine.made_requests import made_request


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


def test_requests_leave_in_order_of_their_keys_and_ties_in_order_of_arrival():
    queue = RequestQueue()
    for key, name in [(2, "c"), (1, "a"), (2, "d"), (1, "b")]:
        queue.push((key,), request(name))
    assert [queue.pop()[1].request_id for _ in range(4)] == ["a", "b", "c", "d"]
    assert queue.peek() is None


def test_requests_that_ended_are_never_seen_again():
    queue = RequestQueue()
    requests = [request(str(i)) for i in range(20)]
    for i, each in enumerate(requests):
        queue.push((i,), each)
    for i in (0, 1, 7, 19, 3):
        bury(queue, requests[i])
    assert len(queue) == len(queue.requests()) == 15
    left = []
    while queue.peek() is not None:
        left.append(int(queue.pop()[1].request_id))
    assert left == [i for i in range(20) if i not in (0, 1, 7, 19, 3)]


def test_the_queue_counts_its_tokens():
    queue = RequestQueue()
    a, b, c = request("a", tokens=3), request("b", tokens=5), request("c", tokens=7)
    for i, each in enumerate((a, b, c)):
        queue.push((i,), each)
    assert queue.num_tokens == 15
    bury(queue, b)
    assert queue.num_tokens == 10
    queue.pop()
    assert queue.num_tokens == 7


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
