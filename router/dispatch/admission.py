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
    """Places that one HTTP request holds; each of its sequences gives one back as it ends."""

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission = admission
        self._count = count

    def release_one(self) -> None:
        if self._count > 0:
            self._count -= 1
            self._admission.give_back(1)

    def release_all(self) -> None:
        count, self._count = self._count, 0
        if count:
            self._admission.give_back(count)


class _Waiter:
    def __init__(self, count: int, ready: asyncio.Future[None]) -> None:
        self.count = count
        self.ready = ready


class Admission:
    """Fair between tenants: the next place goes to the tenant whose last turn is longest ago.

    A request that needs more places than there are gets in when it is alone, so that it is not left waiting forever.
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
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # in the order of their turns
        self._between_ends = Average()
        self._last_end: float | None = None
        self.held = 0
        self.queued = 0  # sequences

    def _fits(self, count: int) -> bool:
        return self.held + count <= self._capacity() or self.held == 0

    async def acquire(self, tenant: str, count: int, deadline: float) -> Slots:
        if not self._queues and self._fits(count):
            self.held += count
            self._metrics.queue_time.observe(0)
            return Slots(self, count)
        if self.queued + count > self._max_queued:
            self._metrics.refusals.labels(reason="queue_full").inc()
            raise QueueFull(
                f"{self.queued} sequences wait already, and no more than {self._max_queued} may",
                self.retry_after_s(),
            )
        began = self._clock()
        waiter = _Waiter(count, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(waiter)
        self.queued += count
        timeout = min(self._timeout_s, deadline - began)
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await waiter.ready
        except TimeoutError:
            self._leave(tenant, waiter)
            self._metrics.deadlines.labels(phase="queue").inc()
            raise DeadlineExceeded(f"no node had room for the request within {timeout:.0f} s") from None
        except BaseException:
            self._leave(tenant, waiter)
            raise
        self._metrics.queue_time.observe(self._clock() - began)
        return Slots(self, count)

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        if waiter.ready.done() and not waiter.ready.cancelled() and waiter.ready.exception() is None:
            self.give_back(waiter.count)  # its place came in the moment it stopped waiting
            return
        queue = self._queues.get(tenant)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            self.queued -= waiter.count
            if not queue:
                del self._queues[tenant]
        self.pump()

    def give_back(self, count: int) -> None:
        self.held -= count
        now = self._clock()
        if self._last_end is not None:
            self._between_ends.observe((now - self._last_end) / count)
        self._last_end = now
        self.pump()
        self._on_release()

    def refuse_all(self, error: TandemError) -> None:
        """Whoever still waits need not."""
        for queue in self._queues.values():
            for waiter in queue:
                if not waiter.ready.done():
                    waiter.ready.set_exception(error)

    def pump(self) -> None:
        """Let in whoever fits, tenant by tenant. Called when a place or a node appears."""
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            waiter = queue[0]
            if not self._fits(waiter.count) or self._capacity() == 0:
                return
            queue.popleft()
            self.queued -= waiter.count
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            if not waiter.ready.done():
                self.held += waiter.count
                waiter.ready.set_result(None)

    def retry_after_s(self) -> int:
        """About when the queue as it is now will be through."""
        expected = (self.queued + 1) * (self._between_ends.value or 0.0)
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(expected)))
