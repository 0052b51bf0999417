"""An event loop whose time jumps: when nothing is left to do now, it is the time of the next timer at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tandem.wire.errors import InternalError


class VirtualLoop(asyncio.BaseEventLoop):
    """Coroutines, timers and time-outs run on it as on any other loop. There are no sockets, no subprocesses and no threads: what is
    given to an executor is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self  # `_run_once` of the base class asks it to sleep
        self._failure: BaseException | None = None
        self.set_exception_handler(lambda _, context: self._on_failure(context))

    def time(self) -> float:
        return self._now

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
