"""An event loop on virtual time: when no callback is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from tandem.base.errors import InternalError

# Cancelled timers are removed from the heap when there are more of them than this, and more than live ones.
_MOST_CANCELLED = 100


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs coroutines, timers and time-outs like any other loop, but has no sockets, subprocesses or threads: it runs an executor's
    work at once, in place. Runs are deterministic: timers due at the same time run in the order in which they were set, an order that
    asyncio's own loops do not guarantee."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers_set = 0
        # A heap of (time, unique number, timer)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled = 0  # how many timers in the heap are cancelled
        self._failure: BaseException | None = None
        self.set_exception_handler(lambda _, context: self._on_failure(context))

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._timers_set += 1
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += handle._scheduled  # type: ignore[attr-defined]

    def _on_failure(self, context: dict[str, Any]) -> None:
        self._failure = context.get("exception") or InternalError(str(context.get("message")))

    def _run_once(self) -> None:
        """Replaces the base class's method, which sleeps in a selector until the next timer."""
        if self._failure is not None:
            raise self._failure  # a callback has raised: everything after it would be wrong
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        if self._cancelled > _MOST_CANCELLED and 2 * self._cancelled > len(timers):
            timers[:] = [entry for entry in timers if not entry[2].cancelled()]
            heapq.heapify(timers)
            self._cancelled = 0
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
                self._cancelled -= 1
            if not timers:
                raise InternalError("the simulation waits for something that never happens")
            self._now = max(self._now, timers[0][0])
        # As in the base class, timers within the clock's resolution run together.
        end = self._now + self._clock_resolution  # type: ignore[attr-defined]
        while timers and timers[0][0] < end:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._cancelled -= 1
            else:
                ready.append(timer)
        # Callbacks that these add run in the next call.
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            try:
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._failure = error

    def _process_events(self, event_list: list[Any]) -> None:
        """No I/O events exist here."""

    def _write_to_self(self) -> None:
        """No other thread exists that could have to wake this loop."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done
