"""Which sequences may run, which wait, and which one is next.

A sequence is admitted when a decode node has the blocks that it may take, and while fewer than
`inflight_per_node` sequences per node run, so nodes get as much work as they can hold. A waiting sequence
holds nothing on any node. When the expected wait, here and in nodes' lines, is too long, the answer is 503
with Retry-After.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from tandem.router.metrics import RouterMetrics
from tandem.router.policy.views import Average
from tandem.wire.errors import DeadlineExceeded, Overloaded, TandemError

MIN_RETRY_AFTER_S = 1
MOST_PASSED_OVER = 32
MAX_RETRY_AFTER_S = 60


class QueueFull(Overloaded):
    """A refusal with the time after which the client should try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Slots:
    """The places of one HTTP request. Each of its sequences needs one; they come one at a time, in the
    tenant's turns."""

    def __init__(self, admission: Admission, tenant: str, wanted: int, tokens: int, priority: int) -> None:
        self._admission = admission
        self._on_place: Callable[[], None] | None = None
        self._on_refused: Callable[[TandemError], None] | None = None
        self.tenant = tenant
        self.wanted = wanted  # places that it still waits for
        # The expected length of its longest sequence, which decides how many blocks it needs.
        self.tokens = tokens
        self.priority = priority  # lower goes first
        self.came = 0.0  # when it joined the line
        self.held = 0
        self.passed = 0  # how often others were admitted before it because their blocks were free
        self.unbegun = 0  # held places on which no sequence has begun
        self.first: asyncio.Future[None] | None = None  # set with the first place; `acquire` waits for it

    def listen(self, on_place: Callable[[], None], on_refused: Callable[[TandemError], None]) -> None:
        """Sets the callbacks: `on_place` for each further place, `on_refused` when no more will come."""
        self._on_place, self._on_refused = on_place, on_refused

    def unlisten(self) -> None:
        self._on_place = self._on_refused = None

    def grant(self, count: int) -> None:
        self.wanted -= count
        self.held += count
        self.unbegun += count
        self._admission.promised += count * self.tokens
        if self.first is not None and not self.first.done():
            self.first.set_result(None)
        if self._on_place is not None:
            for _ in range(count):
                self._on_place()

    def refuse(self, error: TandemError) -> None:
        if self.first is not None and not self.first.done():
            self.first.set_exception(error)
        elif self._on_refused is not None:
            self._on_refused(error)

    def begin_one(self) -> None:
        """A sequence begins on a held place. From here on its nodes' statuses count its blocks."""
        if self.unbegun > 0:
            self.unbegun -= 1
            self._admission.promised -= self.tokens

    def release_one(self) -> None:
        """A sequence that had begun has ended."""
        if self.held > 0:
            self.held -= 1
            self._admission.give_back(1)

    def drop_one(self) -> None:
        """A sequence has ended without having begun."""
        if self.wanted > 0:
            self._admission.leave(self, 1)
        else:
            self.begin_one()
            self.release_one()

    def release_all(self) -> None:
        self._admission.leave(self, self.wanted)
        while self.unbegun:
            self.begin_one()
        count, self.held = self.held, 0
        if count:
            self._admission.give_back(count)


class Admission:
    """Gives out places, fairly between tenants: the next place goes to the tenant that has waited longest
    since its last one, and within the tenant to the request that has waited longest since its last one.

    A place is for one sequence. A request with several sequences begins with its first place and goes to the
    end of its tenant's line for the next. So it keeps no place empty while it waits for others, no request
    waits for all of its places, and no more requests than the line is long overtake it before each of them.

    If nodes schedule by priority, the line does too: turns are taken among requests of one priority, and a
    request waits for all those with a lower number.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_queued: int,
        timeout_s: float,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        on_release: Callable[[], None],
        has_room: Callable[[int, int], bool] = lambda tokens, promised: True,
        is_paused: Callable[[], bool] = lambda: False,
        *,
        by_priority: bool = False,
        admit_within_s: float | None = None,
        wait_at_nodes: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`has_room(tokens, promised)`: whether a node has the blocks for a sequence of `tokens`, after the
        `promised` tokens of admitted sequences that have not begun.

        `is_paused`: an operator holds all requests back, so there is no place.

        `admit_within_s`: a request is refused if it would wait longer than this until its prompt is begun.
        `wait_at_nodes`: the part of that wait that a request spends in a node's line.
        """
        self._capacity = capacity
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._clock = clock
        self._metrics = metrics
        self._on_release = on_release
        self._has_room = has_room
        self._is_paused = is_paused
        self._by_priority = by_priority
        self._admit_within_s = admit_within_s
        self._wait_at_nodes = wait_at_nodes
        # By tenant, in the order of their turns.
        self._queues: OrderedDict[str, deque[Slots]] = OrderedDict()
        self._between_ends = Average()
        self._last_end: float | None = None
        self.held = 0
        self.queued = 0  # sequences
        self.promised = 0  # tokens of sequences that have a place and have not begun

    async def acquire(
        self, tenant: str, count: int, deadline: float, tokens: int = 0, priority: int = 0
    ) -> Slots:
        """Returns when the first of `count` places is there; the others may come later. `tokens`: the length
        that each sequence is expected to reach, which decides how many blocks it needs. Waits until
        `deadline` or for `timeout_s`, whichever ends first. Raises QueueFull or DeadlineExceeded."""
        self._refuse_a_long_wait()
        slots = Slots(self, tenant, count, tokens, priority if self._by_priority else 0)
        at_once = 0
        while not self._queues and at_once < count and self._fits(slots):
            at_once += 1
            self.held += 1
            slots.grant(1)
        rest = count - at_once
        if rest and (why := self._why_refused(rest, at_once)) is not None:
            slots.wanted = 0  # it never joined the line
            slots.release_all()
            self._metrics.refusals.labels(reason="queue_full").inc()
            raise QueueFull(why, self.retry_after_s())
        if rest:
            slots.came = self._clock()
            _stand_in(self._queues.setdefault(tenant, deque()), slots)
            self.queued += rest
        if at_once:
            self._metrics.router_queue_time.observe(0)
            return slots
        began = self._clock()
        timeout = min(self._timeout_s, deadline - began)
        slots.first = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await slots.first
        except TimeoutError:
            slots.release_all()
            self._metrics.deadlines.labels(phase="queue").inc()
            what = "requests are paused" if self._is_paused() else "no node had room for the request"
            why = f"{what}, and it waited for {timeout:.0f} s"
            if self._timeout_s < deadline - began:
                raise QueueFull(why, self.retry_after_s()) from None
            raise DeadlineExceeded(why) from None
        except BaseException:
            slots.release_all()
            raise
        self._metrics.router_queue_time.observe(self._clock() - began)
        return slots

    def _refuse_a_long_wait(self) -> None:
        """Raises QueueFull when the request would begin too late: its work would delay others and then be
        thrown away."""
        if self._admit_within_s is None:
            return
        wait = self._wait_at_nodes() + (self._expected_wait_s() if self.queued else 0.0)
        if wait > self._admit_within_s:
            self._metrics.refusals.labels(reason="long_wait").inc()
            raise QueueFull(
                f"a request would wait for about {wait:.1f} s before its prompt is read; router.admit_within is {self._admit_within_s:g} s",
                _in_bounds(wait - self._admit_within_s),
            )

    def oldest_wait_s(self) -> float:
        """How long the oldest request in line has waited."""
        now = self._clock()
        return max((now - slots.came for queue in self._queues.values() for slots in queue), default=0.0)

    @property
    def capacity(self) -> int:
        return self._capacity()

    def _fits(self, slots: Slots) -> bool:
        return self.held < self._capacity() and self._has_room(slots.tokens, self.promised)

    def _why_refused(self, count: int, at_once: int) -> str | None:
        if self.queued + count > self._max_queued:
            return f"{self.queued} sequences wait already, and no more than {self._max_queued} may"
        wait = self._expected_wait_s()
        if at_once == 0 and wait > self._timeout_s:
            return f"{self.queued} sequences wait already, and the last of them for about {wait:.0f} s"
        return None

    def leave(self, slots: Slots, count: int) -> None:
        """Takes `count` of its sequences out of the line."""
        if count == 0:
            return
        slots.wanted -= count
        self.queued -= count
        if slots.wanted == 0:
            queue = self._queues[slots.tenant]
            queue.remove(slots)
            if not queue:
                del self._queues[slots.tenant]
        self._on_release()

    def give_back(self, count: int) -> None:
        self.held -= count
        now = self._clock()
        # The time between two ends says how fast the line moves, but only while there is a line.
        if self._last_end is not None and self.queued:
            self._between_ends.observe((now - self._last_end) / count)
        self._last_end = now if self.queued else None
        self.pump()
        self._on_release()

    def refuse_all(self, error: TandemError) -> None:
        """Refuses all requests in line."""
        for queue in list(self._queues.values()):
            for slots in list(queue):
                slots.refuse(error)

    def pump(self) -> None:
        """Gives out the free places. Called when a place is given back or a pool changes."""
        while (tenant := self._next_tenant()) is not None:
            queue = self._queues[tenant]
            slots = queue.popleft()
            slots.passed = 0
            self.queued -= 1
            self.held += 1
            if slots.wanted > 1:
                _stand_in(queue, slots)
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            slots.grant(1)

    def _next_tenant(self) -> str | None:
        """Returns the tenant whose turn it is, or None. A request whose blocks no node has is passed over, so
        that others can go on. After MOST_PASSED_OVER times the whole line waits for its blocks."""
        if not self._queues or self.held >= self._capacity():
            # Checked first, because counting a pool's room is costly and every status of every node calls this.
            return None
        passed: list[Slots] = []
        turns: Iterable[tuple[str, deque[Slots]]] = self._queues.items()
        if self._by_priority:
            turns = sorted(turns, key=lambda turn: turn[1][0].priority)
        for tenant, queue in turns:
            slots = queue[0]
            if self._has_room(slots.tokens, self.promised):
                for other in passed:
                    other.passed += 1
                return tenant
            if slots.passed >= MOST_PASSED_OVER:
                return None
            passed.append(slots)
        return None

    def retry_after_s(self) -> int:
        """About how long the present queue takes, in whole seconds from MIN_RETRY_AFTER_S to
        MAX_RETRY_AFTER_S."""
        return _in_bounds(self._expected_wait_s())

    def _expected_wait_s(self) -> float:
        return (self.queued + 1) * (self._between_ends.value or 0.0)


def _in_bounds(retry_after_s: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(retry_after_s)))


def _stand_in(queue: deque[Slots], slots: Slots) -> None:
    """Inserts at the end of the requests with the same priority."""
    place = len(queue)
    while place and queue[place - 1].priority > slots.priority:
        place -= 1
    queue.insert(place, slots)
