"""Requests in order of their keys, with removal from anywhere."""

from __future__ import annotations

import heapq
from typing import Any

from tandem.engine.request import Request

SortKey = tuple[Any, ...]


class RequestQueue:
    """A heap. A request that ends while it is queued leaves a tombstone, which goes when it comes to the head
    or when tombstones outnumber the living, so removing one of many costs as little as adding one."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, int, Request]] = []
        self._pushed = 0  # breaks ties between equal keys, first come first served
        self._dead = 0
        self.num_tokens = 0  # of all requests in the queue

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
        """The request that `peek` returned, with its key."""
        key, _, request = heapq.heappop(self._heap)
        self.num_tokens -= request.num_tokens
        return key, request

    def bury(self, request: Request) -> None:
        """A request in the queue has finished."""
        self.num_tokens -= request.num_tokens
        self._dead += 1
        if self._dead > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._dead = 0

    def requests(self) -> list[Request]:
        """In no particular order."""
        return [entry[2] for entry in self._heap if not entry[2].is_finished]
