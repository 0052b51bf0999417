"""Turns for work that many clients may ask for at the same moment, so that streams go on in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice

# For how long work begins in one pass: a loop that waits for a core itself does not do its work in smaller parts. A
# piece takes about a millisecond at most.
PASS_S = 0.003
# Of those that wait, the most that look in one pass whether there is time for them.
MOST_A_PASS = 16


class Turns:
    """Lets work begin in each pass of the event loop for a short time, in the order in which it came.

    The loop runs all that is ready before it looks at its sockets again. Without turns, hundreds of requests
    that arrive together would hold up every stream until the last of them had been handled.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._until: float | None = None  # when it is too late in this pass; None: nothing has begun in it
        self._line: dict[object, asyncio.Future[None]] = {}  # in order; each is told when to look again
        self._is_called = False

    async def turn(self) -> None:
        """Returns when the caller may do one piece of work."""
        if not self._line and self._has_time():
            return
        loop, me = asyncio.get_running_loop(), object()
        try:
            while True:
                self._call()
                look = self._line[me] = loop.create_future()  # at its old place
                await look
                if self._has_time():
                    return
        finally:
            del self._line[me]

    def _has_time(self) -> bool:
        now = self._clock()
        if self._until is None:
            self._until = now + PASS_S
            self._call()
        return now < self._until

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._on_next_pass)

    def _on_next_pass(self) -> None:
        self._until, self._is_called = None, False
        for look in islice(self._line.values(), MOST_A_PASS):
            if not look.done():
                look.set_result(None)
        if self._line:
            self._call()
