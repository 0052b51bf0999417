"""Turns for work that many clients may ask for at the same moment, so that streams go on in between."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable

# Each takes about a millisecond at most.
TURNS_A_PASS = 4


class Turns:
    """Lets a few pieces of work begin in each pass of the event loop, in the order in which they came.

    The loop runs all that is ready before it looks at its sockets again. Without turns, hundreds of requests
    that arrive together would hold up every stream until the last of them had been handled.
    """

    def __init__(self) -> None:
        self._left = TURNS_A_PASS
        self._waiting: deque[Callable[[], object]] = deque()

    def begin(self, work: Callable[[], object]) -> None:
        """Calls `work` now or in one of the next passes. It must not raise."""
        if self._left and not self._waiting:
            self._take()
            work()
        else:
            self._waiting.append(work)

    async def turn(self) -> None:
        """Returns when the caller may do one piece of work."""
        if self._left and not self._waiting:
            self._take()
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(functools.partial(_wake, ready))
        await ready

    def _take(self) -> None:
        if self._left == TURNS_A_PASS:
            asyncio.get_running_loop().call_soon(self._on_next_pass)
        self._left -= 1

    def _on_next_pass(self) -> None:
        self._left = TURNS_A_PASS
        while self._left and self._waiting:
            self._take()
            self._waiting.popleft()()


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
