"""An event loop whose time jumps: when nothing is left to do now, it is the time of the next timer at once."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable
from typing import Any

from tandem.wire.errors import InternalError


class _Timer(asyncio.TimerHandle):
    """Those of one moment run in the order in which they were set. asyncio's own leave that to the heap that holds them."""

    def __init__(self, number: int, when: float, *args: Any) -> None:
        super().__init__(when, *args)
        self._number = number

    def __lt__(self, other: Any) -> bool:
        return (self._when, self._number) < (other._when, other._number)  # type: ignore[attr-defined]


class VirtualLoop(asyncio.BaseEventLoop):
    """Coroutines, timers and time-outs run on it as on any other loop. There are no sockets, no subprocesses and no threads: what is
    given to an executor is done at once. The same run is the same again, timers of one moment included."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers_set = 0
        self._selector = self  # `_run_once` of the base class asks it to sleep
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
        timer = _Timer(self._timers_set, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _on_failure(self, context: dict[str, Any]) -> None:
        self._failure = context.get("exception") or InternalError(str(context.get("message")))

    def select(self, timeout: float | None) -> list[Any]:
        if self._failure is not None:
            raise self._failure  # a callback's: what follows from it would be wrong
        if timeout is None:
            raise InternalError("the simulation waits for something that never happens")
        if timeout > 0:
            timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            self._now = timers[0].when()
        return []

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
