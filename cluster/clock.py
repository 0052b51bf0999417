"""Time as the controller sees it, so that a test can be the one who lets it pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from tandem.wire.errors import DeadlineExceeded

T = TypeVar("T")
S = TypeVar("S")


class Clock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T], what: str) -> T:
        """The work's result, or DeadlineExceeded: "`what` took longer than ..."."""
        result, _ = await first_of(work, self.sleep(seconds))
        if has_ended(result):
            return result.result()
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s")


async def first_of(work: Awaitable[T], other: Awaitable[S]) -> tuple[asyncio.Future[T], asyncio.Future[S]]:
    """Returns when one of the two has ended, in whatever way; the other one has been cancelled by then. Cancelled
    itself, it cancels both."""
    futures = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            await cancel(future)
    return futures


def has_ended(future: asyncio.Future[Any]) -> bool:
    """It has a result or an error: `first_of` did not cancel it."""
    return future.done() and not future.cancelled()


async def cancel(task: asyncio.Future[Any]) -> None:
    """Ends a task and waits until it has ended; what it raises then interests nobody any more."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: asyncio would log it as lost
