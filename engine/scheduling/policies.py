"""Who goes first and who goes when memory runs out. A policy is one class here and its name in the
configuration; nothing else in the scheduler asks which one it is."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from tandem.engine.config import SchedulingPolicy
from tandem.engine.request import Request
from tandem.engine.scheduling.queue import RequestQueue, SortKey


class QueuePolicy(abc.ABC):
    """Smaller keys leave a queue first."""

    @abc.abstractmethod
    def key_on_arrival(self, request: Request) -> SortKey: ...

    @abc.abstractmethod
    def key_on_preemption(self, request: Request) -> SortKey: ...

    @abc.abstractmethod
    def key_on_skip(self, request: Request) -> SortKey:
        """Its place among the requests that were passed over; kept for as long as it is one of them."""

    @abc.abstractmethod
    def choose(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue | None:
        """The queue whose head is considered next; None when both are empty."""

    @abc.abstractmethod
    def victim(self, running: Sequence[Request]) -> int:
        """The index of the running request that gives up its blocks when there are too few."""

    @abc.abstractmethod
    def least_urgent(self, waiting: Iterable[Request]) -> Request:
        """The last of these to be missed."""


class FirstComeFirstServed(QueuePolicy):
    """A preempted request goes to the front, the last one admitted is the first to be preempted, and those that
    were passed over are older than any that were not."""

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
    """The request's own order decides everywhere: priority, then arrival, then id."""

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
