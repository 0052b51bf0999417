"""The queue of waiting requests, and the policies that order it.

A policy decides which request is admitted first and which is preempted when blocks run out. Each policy is one class here and
a name in the configuration; no other file of the scheduler depends on which one is used.

`WaitingRequests` also holds the requests that were passed over, and those that wait for an event.
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tandem.engine.config import SchedulingPolicy
from tandem.engine.request import Request

SortKey = tuple[Any, ...]


class RequestQueue:
    """A heap of requests by key. A request that ends while it is queued stays as a tombstone, which is dropped when it comes to
    the head, or when tombstones outnumber live requests. So removing one of many requests costs as little as adding one."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, int, Request]] = []
        self._pushed = 0  # breaks ties between equal keys in the order of pushing
        self._dead = 0
        self.num_tokens = 0  # of all live requests in the queue

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, key: SortKey, request: Request) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (key, self._pushed, request))
        self.num_tokens += request.num_tokens

    def peek(self) -> Request | None:
        heap = self._heap
        while heap:
            request = heap[0][2]
            if not request.is_finished:
                return request
            heapq.heappop(heap)
            self._dead -= 1
        return None

    def pop(self) -> tuple[SortKey, Request]:
        """Removes and returns the request that `peek` returned, with its key."""
        key, _, request = heapq.heappop(self._heap)
        self.num_tokens -= request.num_tokens
        return key, request

    def bury(self, request: Request) -> None:
        """A request in this queue has finished; its entry becomes a tombstone."""
        self.num_tokens -= request.num_tokens
        self._dead += 1
        if self._dead > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._dead = 0

    def rekey(self, key_of: Callable[[SortKey, Request], SortKey]) -> None:
        """Replaces every request's key by `key_of` of its old key and the request."""
        self._heap = [(key_of(key, request), pushed, request) for key, pushed, request in self._heap]
        heapq.heapify(self._heap)

    def requests(self) -> list[Request]:
        """In no particular order."""
        return [entry[2] for entry in self._heap if not entry[2].is_finished]


class QueuePolicy(abc.ABC):
    """Smaller keys leave a queue first."""

    @abc.abstractmethod
    def key_on_arrival(self, request: Request) -> SortKey: ...

    @abc.abstractmethod
    def key_on_preemption(self, request: Request) -> SortKey: ...

    @abc.abstractmethod
    def key_on_skip(self, request: Request) -> SortKey:
        """The request's key among those that were passed over. It keeps this key until it is admitted."""

    def key_again(self, key: SortKey, request: Request) -> SortKey:
        """The new key of a queued request after something has changed that keys depend on, such as a pin. `key` is its old one,
        made by any of the methods above."""
        return key

    @abc.abstractmethod
    def choose(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue | None:
        """Returns the queue whose head is considered next; None when both are empty."""

    @abc.abstractmethod
    def victim(self, running: Sequence[Request]) -> int:
        """Returns the index of the running request to preempt when blocks run out."""

    @abc.abstractmethod
    def least_urgent(self, waiting: Iterable[Request]) -> Request:
        """Returns the waiting request that loses its blocks first."""


class FirstComeFirstServed(QueuePolicy):
    """Preempted requests go to the front of the line, the request admitted last is preempted first, and requests that were
    passed over go before all others, because they are older."""

    def __init__(self) -> None:
        self._back = 0
        self._front = 0
        self._skips = 0

    def key_on_arrival(self, request: Request) -> SortKey:
        self._back += 1
        return (self._back,)

    def key_on_preemption(self, request: Request) -> SortKey:
        self._front -= 1
        return (self._front,)

    def key_on_skip(self, request: Request) -> SortKey:
        self._skips += 1
        return (self._skips,)

    def choose(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue | None:
        if skipped.peek() is not None:
            return skipped
        return waiting if waiting.peek() is not None else None

    def victim(self, running: Sequence[Request]) -> int:
        return len(running) - 1

    def least_urgent(self, waiting: Iterable[Request]) -> Request:
        return max(waiting, key=lambda request: (request.arrival_time, request.request_id))


class ByPriority(QueuePolicy):
    """Requests are ordered by priority, then arrival, then id, in every queue and for preemption."""

    def key_on_arrival(self, request: Request) -> SortKey:
        return request.sort_key

    def key_on_preemption(self, request: Request) -> SortKey:
        return request.sort_key

    def key_on_skip(self, request: Request) -> SortKey:
        return request.sort_key

    def choose(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue | None:
        first, passed_over = waiting.peek(), skipped.peek()
        if first is None:
            return skipped if passed_over is not None else None
        if passed_over is None:
            return waiting
        return waiting if first < passed_over else skipped

    def victim(self, running: Sequence[Request]) -> int:
        return max(range(len(running)), key=lambda i: running[i].sort_key)

    def least_urgent(self, waiting: Iterable[Request]) -> Request:
        return max(waiting, key=lambda request: request.sort_key)


_POLICIES: dict[SchedulingPolicy, type[QueuePolicy]] = {
    SchedulingPolicy.FCFS: FirstComeFirstServed,
    SchedulingPolicy.PRIORITY: ByPriority,
}


def make_policy(name: SchedulingPolicy) -> QueuePolicy:
    return _POLICIES[name]()


class WaitingRequests:
    """Every waiting request is in one of two queues or in `blocked`; the policy chooses between the heads of the queues.

    `waiting` is the line. `skipped` holds requests that were passed over once, because they waited for an event or because
    there was no room for their adapter; each keeps the key that it got then. `blocked` holds requests whose event has not come
    yet, with that key, so that a step does not walk over them. A request that is passed over in a step returns to `skipped` at
    the step's end, so each is considered once per step.

    `holders` are queued requests that already have blocks: their KV was loaded, or was kept in a rewind.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._waiting = RequestQueue()
        self._skipped = RequestQueue()
        self._passed_over: list[tuple[SortKey, Request]] = []
        self._queue_of: dict[str, RequestQueue] = {}
        self.blocked: dict[str, tuple[SortKey, Request]] = {}
        self.holders: dict[str, Request] = {}

    def __len__(self) -> int:
        return self.num_ready + len(self.blocked)

    @property
    def num_ready(self) -> int:
        """How many requests could be admitted in the next step: all but the blocked ones."""
        return len(self._queue_of)

    def add(self, request: Request) -> None:
        """Queues a new request, or blocks it if it waits for an event, such as its grammar."""
        if request.status.is_blocked:
            self.block(request)
        else:
            self._push(self._waiting, self._policy.key_on_arrival(request), request)

    def put_back(self, request: Request) -> None:
        """Queues a request that was preempted, at the place that the policy gives it."""
        self._push(self._waiting, self._policy.key_on_preemption(request), request)

    def _push(self, queue: RequestQueue, key: SortKey, request: Request) -> None:
        queue.push(key, request)
        self._queue_of[request.request_id] = queue
        if request.num_computed_tokens:
            self.holders[request.request_id] = request

    def ready(self) -> Iterator[Request]:
        """The requests that could be admitted in the next step, in no particular order."""
        yield from self._waiting.requests()
        yield from self._skipped.requests()

    def head(self) -> Request | None:
        queue = self._policy.choose(self._waiting, self._skipped)
        return queue.peek() if queue is not None else None

    def take(self, request: Request) -> None:
        """Removes the head, which is admitted."""
        self._pop(request)

    def pass_over(self, request: Request) -> None:
        """Takes the head out until the step's end: it cannot be admitted in this step, but the next one in line may be, also
        with the blocks that this one has."""
        self._passed_over.append((self._pop(request), request))
        if request.num_computed_tokens:
            self.holders[request.request_id] = request

    def block(self, request: Request) -> None:
        """Blocks a request until `wake`. It is the head, or is not queued."""
        queued = request.request_id in self._queue_of
        key = self._pop(request) if queued else self._policy.key_on_skip(request)
        self.blocked[request.request_id] = (key, request)

    def _pop(self, request: Request) -> SortKey:
        """Removes the head; returns its key among the requests that were passed over, made now if it has none."""
        queue = self._queue_of.pop(request.request_id)
        key, _ = queue.pop()
        self.holders.pop(request.request_id, None)
        return key if queue is self._skipped else self._policy.key_on_skip(request)

    def end_step(self) -> None:
        """Puts the requests that were passed over in this step into `skipped`."""
        for key, request in self._passed_over:
            self._push(self._skipped, key, request)
        self._passed_over.clear()

    def wake(self, request: Request) -> None:
        """The event that a blocked request waited for has come: it can be admitted."""
        key, _ = self.blocked.pop(request.request_id)
        self._push(self._skipped, key, request)

    def put_in_order(self) -> None:
        """Makes all keys again after something has changed that they depend on, such as a pin."""
        key_again = self._policy.key_again
        self._waiting.rekey(key_again)
        self._skipped.rekey(key_again)
        for request_id, (key, request) in self.blocked.items():
            self.blocked[request_id] = (key_again(key, request), request)

    def remove(self, request: Request) -> None:
        """Removes a request that has just finished, from its queue or from `blocked`."""
        if self.blocked.pop(request.request_id, None) is None:
            self._queue_of.pop(request.request_id).bury(request)
            self.holders.pop(request.request_id, None)

    def least_urgent_holder(self, besides: Request) -> Request | None:
        others = [request for request in self.holders.values() if request is not besides]
        return self._policy.least_urgent(others) if others else None

    def lost_blocks(self, request: Request) -> None:
        self.holders.pop(request.request_id, None)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The tokens that queued requests still need computed. Blocked requests, whose KV may be on its way, do not count."""
        held = sum(request.num_computed_tokens for request in self.holders.values())
        return self._waiting.num_tokens + self._skipped.num_tokens - held

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order, but for those passed over in the current step."""
        yield from self.ready()
        for _, request in self.blocked.values():
            yield request
