"""Requests that run when nothing else does, such as the lines of batches.

While any other request could compute, these have no part in a step. Those that ran keep their blocks and rest; new ones stay
in a line of their own. As soon as another request needs blocks, the last of those that rest loses its own, and computes its
tokens again later. So what others feel of them is the rest of one step.

The scheduler's other parts never see them while they rest, because they are then neither running nor waiting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from tandem.engine.config import SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.queue import WaitingRequests

# How long a step should take, as a part of `step_target_ms`.
_STEP = 0.5
FED = 4  # so many of its line are in the scheduler's, to be admitted


class HeldImages(Protocol):
    def release(self, request_id: str) -> None: ...


class RequestPlaces(Protocol):
    """The part of the scheduler's state that this work moves in: `SchedulerState`."""

    running: list[Request]
    config: SchedulerConfig

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def waiting(self) -> WaitingRequests: ...
    @property
    def encoded(self) -> HeldImages | None: ...


def step_s(config: SchedulerConfig) -> float:
    """How long a step should take. 0 sets no target."""
    return _STEP * config.step_target_ms / 1000


class IdleStepLimit:
    """How much fits into a step of the target's length. It grows from a small number, at most to double in each step: a request
    that comes in the middle of a step waits for its end, also at the beginning, when no step has shown how long it takes."""

    def __init__(self, first: int, least: int) -> None:
        self.most = first
        self._least = least

    def took(self, count: int, seconds: float, target_s: float) -> None:
        """A step with so many has taken so long. A target of 0 sets none."""
        if seconds <= 0 or (seconds <= target_s and count < self.most):
            return
        fitting = int(count * target_s / seconds) if target_s else 2 * count
        self.most = max(self._least, min(fitting, 2 * count))


class KVArrivals:
    """When the KV of a prompt may come at the soonest: what its prefill node has cached, and who is before it there, is not known here.
    By its length none is expected sooner than the soonest of the last ones, so about one in so many is."""

    MOST, LEAST = 64, 16

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=self.MOST)  # seconds a token, from a request's arrival to its KV's

    def came(self, request: Request, now: float) -> None:
        if request.num_external_tokens and not request.facts.when_idle:
            self._paces.append((now - request.arrival_time) / request.num_external_tokens)

    def soonest(self, request: Request) -> float:
        if len(self._paces) < self.LEAST:
            return -math.inf
        return request.arrival_time + min(self._paces) * request.num_external_tokens


class IdleWork:
    def __init__(self) -> None:
        self.line: deque[Request] = deque()  # requests without blocks: new ones, and those that lost theirs
        self.resting: list[Request] = []  # running requests that have no part in steps, in order of admission
        self.count = 0  # unfinished ones, wherever they are
        self.called_back: set[str] = set()  # ended ones whose blocks the connector was asked to give up
        self.rows = IdleStepLimit(first=8, least=1)  # how many of these decode in a step
        self.prompt_tokens = IdleStepLimit(first=32, least=32)  # how many tokens of their prompts a step computes
        self.yields = False  # other requests could compute in the step that is being planned
        self.arrivals = KVArrivals()

    def __bool__(self) -> bool:
        return bool(self.line or self.resting)

    def __iter__(self) -> Iterator[Request]:
        yield from self.line
        yield from self.resting

    def add(self, request: Request) -> None:
        """Takes a new request that is ready to be admitted."""
        self.line.append(request)

    def put_back(self, request: Request) -> None:
        """A preempted request is the next to be admitted."""
        self.line.appendleft(request)

    @property
    def fills_step(self) -> bool:
        """Whether the step that was planned last is of this work."""
        return bool(self.count) and not self.yields

    def begin_step(self, state: RequestPlaces) -> None:
        """Called before a step is planned. Takes this work out of it while there is other work, and puts it back when there is
        none."""
        self.yields = self.has_other_work(state)
        if self.yields:
            self._rest(state, 0)
            return
        self._rest(state, self.rows.most)
        while self.resting and len(state.running) < self.rows.most:
            state.running.append(self.resting.pop(0))
        while self.line and state.waiting.num_ready < min(FED, self.rows.most - len(state.running)):
            state.waiting.add(self.line.popleft())

    def may_enter(self, state: RequestPlaces) -> bool:
        """Whether the next step may take more of this work in."""
        return not self.has_other_work(state) and len(state.running) < self.rows.most

    def has_other_work(self, state: RequestPlaces) -> bool:
        """Also while a request's KV may come before the end of a step: its second token would wait for that."""
        if any(not request.facts.when_idle for request in state.running):
            return True
        if any(not request.facts.when_idle for request in state.waiting.ready()):
            return True
        soonest = min(
            (
                self.arrivals.soonest(request)
                for _, request in state.waiting.blocked.values()
                if not request.facts.when_idle and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            ),
            default=math.inf,
        )
        return soonest < state.clock() + step_s(state.config)

    def _rest(self, state: RequestPlaces, rows: int) -> None:
        """Takes all but the first `rows` of this work out of `running`."""
        work = [request for request in state.running if request.facts.when_idle]
        if len(work) <= rows:
            return
        going = work[rows:]
        left = {request.request_id for request in going}
        state.running = [request for request in state.running if request.request_id not in left]
        self.resting[:0] = going
        for request in going:
            request.spec_token_ids = []
            if state.encoded is not None:
                state.encoded.release(request.request_id)

    def last_resting(self) -> Request | None:
        """Takes out the request that loses its blocks first; None without one."""
        return self.resting.pop() if self.resting else None

    def remove(self, request: Request) -> bool:
        """The request has ended. Returns whether it was here."""
        if request in self.line:
            self.line.remove(request)
            return True
        if request in self.resting:
            self.resting.remove(request)
            return True
        return False

    def drop_ended(self) -> None:
        self.resting = [request for request in self.resting if request.status is RequestStatus.RUNNING]
