"""An event loop whose time jumps: when nothing is left to do now, it is the time of the next timer at once."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from tandem.wire.errors import InternalError

# Cancelled timers are thrown away together when they are more than this, and more than those that are left.
_MOST_CANCELLED = 100


class VirtualLoop(asyncio.BaseEventLoop):
    """Coroutines, timers and time-outs run on it as on any other loop. There are no sockets, no subprocesses and no threads: what is
    given to an executor is done at once. The same run is the same again: timers of one moment run in the order in which they were set,
    which asyncio's own loops leave to the heap that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers_set = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap; no two have one number
        self._cancelled = 0  # of these
        self._failure: BaseException | None = None
        self.set_exception_handler(lambda _, context: self._on_failure(context))

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
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
        """In the place of the base class's, which would ask a selector to sleep until the next timer."""
        if self._failure is not None:
            raise self._failure  # a callback's: what follows from it would be wrong
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
        # Together with those that come before a real clock would show another time, as in the base class.
        end = self._now + self._clock_resolution  # type: ignore[attr-defined]
        while timers and timers[0][0] < end:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._cancelled -= 1
            else:
                ready.append(timer)
        # What these add runs the next time.
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
        """There are none: nothing comes from outside."""

    def _write_to_self(self) -> None:
        """There is no other thread that would have to wake it."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done
