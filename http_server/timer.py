"""What a connection does when a time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CLOCK_STEP_S = 0.001  # the resolution of uvloop's clock


class ConnectionTimer:
    """One callback at a time. The event loop's timer may be set for an earlier time and is then set again when it
    rings, because nearly every time is stopped, request by request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.then: Callable[[], None] | None = None  # what is done when the time is over
        self._loop = loop
        self._due = self._rings_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, then: Callable[[], None]) -> None:
        self.then = then
        self._due = self._loop.time() + seconds
        if self._timer is not None:
            if self._rings_at <= self._due:
                return
            self._timer.cancel()
        self._set_to_ring()

    def stop(self) -> None:
        self.then = None

    def close(self) -> None:
        self.then = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_to_ring(self) -> None:
        self._rings_at = self._due
        self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        then = self.then
        if then is None:
            return
        if self._due - self._loop.time() > CLOCK_STEP_S:
            self._set_to_ring()
            return
        self.then = None
        then()
