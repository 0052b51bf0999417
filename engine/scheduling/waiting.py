"""Everything that does not run: in line, passed over, or waiting for an event."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.engine.request import Request
from tandem.engine.scheduling.queue import QueuePolicy, RequestQueue, SortKey


class WaitingRequests:
    """Two queues, and the policy chooses between their heads.

    `waiting` is the line. `skipped` holds those that were passed over once, because they waited for an event or
    because there was no room for their adapter; they keep the place that they got there. Those whose event is
    still to come stand aside under `blocked`, with that place, so that a step doesn't walk over them. What
    is passed over in a step is put back only when the step is decided: it is considered once per step.

    `holders` are in line and have blocks all the same: their KV came from outside, or survived a rewind.
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
        """Those that could be admitted in the next step."""
        return len(self._queue_of)

    def add(self, request: Request) -> None:
        """A new request joins the line, or stands aside if it waits for an event from the start."""
        if request.status.is_blocked:
            self.block(request)
        else:
            self._push(self._waiting, self._policy.key_on_arrival(request), request)

    def put_back(self, request: Request) -> None:
        """A request that ran joins the line again, where the policy wants preempted ones."""
        self._push(self._waiting, self._policy.key_on_preemption(request), request)

    def _push(self, queue: RequestQueue, key: SortKey, request: Request) -> None:
        queue.push(key, request)
        self._queue_of[request.request_id] = queue
        if request.num_computed_tokens:
            self.holders[request.request_id] = request

    def head(self) -> Request | None:
        queue = self._policy.choose(self._waiting, self._skipped)
        return queue.peek() if queue is not None else None

    def take(self, request: Request) -> None:
        """The head leaves, to run."""
        self._pop(request)

    def pass_over(self, request: Request) -> None:
        """The head can't run in this step, but the next in line may."""
        self._passed_over.append((self._pop(request), request))

    def block(self, request: Request) -> None:
        """Stands aside until `wake`: the head, or a request that is not queued."""
        queued = request.request_id in self._queue_of
        key = self._pop(request) if queued else self._policy.key_on_skip(request)
        self.blocked[request.request_id] = (key, request)

    def _pop(self, request: Request) -> SortKey:
        """Returns the place that the request has, or now gets, among the passed over."""
        queue = self._queue_of.pop(request.request_id)
        key, _ = queue.pop()
        self.holders.pop(request.request_id, None)
        return key if queue is self._skipped else self._policy.key_on_skip(request)

    def end_step(self) -> None:
        """Those that were passed over can be considered again."""
        for key, request in self._passed_over:
            self._push(self._skipped, key, request)
        self._passed_over.clear()

    def wake(self, request: Request) -> None:
        """The event that a blocked request waited for has come."""
        key, _ = self.blocked.pop(request.request_id)
        self._push(self._skipped, key, request)

    def put_in_order(self) -> None:
        """Something has changed that the policy's keys depend on."""
        key_again = self._policy.key_again
        self._waiting.rekey(key_again)
        self._skipped.rekey(key_again)
        for request_id, (key, request) in self.blocked.items():
            self.blocked[request_id] = (key_again(key, request), request)

    def remove(self, request: Request) -> None:
        """A request that just finished leaves, wherever it is."""
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
        """What those in line still need computed. What is on its way from outside does not count."""
        held = sum(request.num_computed_tokens for request in self.holders.values())
        return self._waiting.num_tokens + self._skipped.num_tokens - held

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no particular order."""
        yield from self._waiting.requests()
        yield from self._skipped.requests()
        for _, request in self.blocked.values():
            yield request
