"""How many sequences run at once, who waits, and whose turn is next."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable

from tandem.router.metrics import RouterMetrics
from tandem.router.rates import Average
from tandem.wire.errors import DeadlineExceeded, Overloaded, TandemError

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


class QueueFull(Overloaded):
    """Carries what the client is told: when it is worth trying again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Slots:
    """One HTTP request's places. Each of its sequences needs one; they come one at a time, in the tenant's turns."""

    def __init__(self, admission: Admission, tenant: str, wanted: int) -> None:
        self._admission = admission
        self._on_place: Callable[[], None] | None = None
        self._on_refused: Callable[[TandemError], None] | None = None
        self.tenant = tenant
        self.wanted = wanted  # that it is still in line for
        self.held = 0
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def listen(self, on_place: Callable[[], None], on_refused: Callable[[TandemError], None]) -> None:
        """`on_place` is called for each place that it has and each that will come, `on_refused` when no more come."""
        self._on_place, self._on_refused = on_place, on_refused
        for _ in range(self.held):
            on_place()

    def grant(self, count: int) -> None:
        self.wanted -= count
        self.held += count
        if not self.first.done():
            self.first.set_result(None)
        if self._on_place is not None:
            for _ in range(count):
                self._on_place()

    def refuse(self, error: TandemError) -> None:
        if not self.first.done():
            self.first.set_exception(error)
        elif self._on_refused is not None:
            self._on_refused(error)

    def release_one(self) -> None:
        """A sequence that had a place has ended."""
        if self.held > 0:
            self.held -= 1
            self._admission.give_back(1)

    def drop_one(self) -> None:
        """A sequence has ended that had not begun."""
        if self.wanted > 0:
            self._admission.leave(self, 1)
        else:
            self.release_one()

    def release_all(self) -> None:
        self._admission.leave(self, self.wanted)
        count, self.held = self.held, 0
        if count:
            self._admission.give_back(count)


class Admission:
    """Fair between tenants: the next place goes to the tenant whose last turn is longest ago, and within the tenant to
    the request whose last turn is longest ago.

    A place is one sequence's. A request for many begins with the first place that it gets, and goes to the end of its
    tenant's line for the next: it keeps no place empty while it waits for others, nobody waits for all of its sequences,
    and it is not overtaken by more than the line's length before each of them.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_queued: int,
        timeout_s: float,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        on_release: Callable[[], None],
    ) -> None:
        self._capacity = capacity
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._clock = clock
        self._metrics = metrics
        self._on_release = on_release
        self._queues: OrderedDict[str, deque[Slots]] = OrderedDict()  # in the order of their turns
        self._between_ends = Average()
        self._last_end: float | None = None
        self.held = 0
        self.queued = 0  # sequences

    async def acquire(self, tenant: str, count: int, deadline: float) -> Slots:
        """Returns with the first of `count` places; the others may come later. Raises QueueFull, DeadlineExceeded."""
        slots = Slots(self, tenant, count)
        at_once = 0 if self._queues else min(count, max(0, self._capacity() - self.held))
        rest = count - at_once
        if rest and self.queued + rest > self._max_queued:
            self._metrics.refusals.labels(reason="queue_full").inc()
            raise QueueFull(
                f"{self.queued} sequences wait already, and no more than {self._max_queued} may",
                self.retry_after_s(),
            )
        if at_once:
            self.held += at_once
            slots.grant(at_once)
        if rest:
            self._queues.setdefault(tenant, deque()).append(slots)
            self.queued += rest
        if at_once:
            self._metrics.queue_time.observe(0)
            return slots
        began = self._clock()
        timeout = min(self._timeout_s, deadline - began)
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await slots.first
        except TimeoutError:
            slots.release_all()
            self._metrics.deadlines.labels(phase="queue").inc()
            raise DeadlineExceeded(f"no node had room for the request within {timeout:.0f} s") from None
        except BaseException:
            slots.release_all()
            raise
        self._metrics.queue_time.observe(self._clock() - began)
        return slots

    def leave(self, slots: Slots, count: int) -> None:
        """`count` of its sequences are no longer in line."""
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
        if self._last_end is not None:
            self._between_ends.observe((now - self._last_end) / count)
        self._last_end = now
        self.pump()
        self._on_release()

    def refuse_all(self, error: TandemError) -> None:
        """Those in line get no place any more."""
        for queue in list(self._queues.values()):
            for slots in list(queue):
                slots.refuse(error)

    def pump(self) -> None:
        """Gives out what is free. Called when a place or a node appears."""
        while self._queues and self.held < self._capacity():
            tenant, queue = next(iter(self._queues.items()))
            slots = queue.popleft()
            self.queued -= 1
            self.held += 1
            if slots.wanted > 1:
                queue.append(slots)
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            slots.grant(1)

    def retry_after_s(self) -> int:
        """About when the queue as it is now will be through."""
        expected = (self.queued + 1) * (self._between_ends.value or 0.0)
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(expected)))
