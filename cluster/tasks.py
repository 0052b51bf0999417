"""Waiting for the first of several tasks, work in a thread of its own, and a clock that tests can replace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from tandem.base.errors import DeadlineExceeded
from tandem.base.progress import LastProgress

logger = logging.getLogger(__name__)

_SAY_AFTER_S = 0.7

T = TypeVar("T")


class Wakeup:
    """Wakes all its waiters. A waiter looks first and then waits; without an await in between it misses nothing."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self) -> None:
        await self._rung.wait()


S = TypeVar("S")


class Clock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T], what: str) -> T:
        """Returns the work's result. Cancels it and raises DeadlineExceeded ("`what` took longer than ...") after `seconds`."""
        result, _ = await first_of(work, self.sleep(seconds))
        if has_ended(result):
            return result.result()
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s")

    async def while_it_progresses(
        self, limit_s: float, work: Coroutine[Any, Any, T], what: str, progress: LastProgress
    ) -> T:
        """Returns the work's result, however long it takes. Cancels it and raises DeadlineExceeded when it has reported nothing new for
        `limit_s`."""
        progress.begin()
        result, _ = await first_of(work, self._until_silent(limit_s, progress))
        if has_ended(result):
            return result.result()
        raise DeadlineExceeded(f"{what} made no progress for {limit_s:g} s, {progress}")

    async def _until_silent(self, limit_s: float, progress: LastProgress) -> None:
        while nap := progress.next_look(limit_s):
            slept_at = self.now()
            await self.sleep(nap)
            progress.overslept(self.now() - slept_at - nap)


async def first_of(work: Awaitable[T], other: Awaitable[S]) -> tuple[asyncio.Future[T], asyncio.Future[S]]:
    """Returns when the first of the two has ended, with a result or an error, after cancelling the other. When it is cancelled itself, it
    cancels both."""
    futures = asyncio.ensure_future(work), asyncio.ensure_future(other)
    both: tuple[asyncio.Future[Any], ...] = futures
    await first_ended(both)
    return futures


async def saying_if_slow(work: Awaitable[T], say: Callable[[], None]) -> T:
    """Awaits `work`. Calls `say` once if it takes so long that an operator would wonder."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=_SAY_AFTER_S)
    if not done:
        say()
    return await task


async def first_ended(works: Iterable[Awaitable[T]]) -> list[asyncio.Future[T]]:
    """Like `first_of`, for any number."""
    futures: list[asyncio.Future[T]] = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:  # all of them first: the wait may be cancelled, too
            future.cancel()
        if running := [future for future in futures if not future.done()]:
            await asyncio.wait(running)
        for future in futures:
            if not future.cancelled():
                future.exception()  # retrieved, or asyncio would log it as never retrieved
    return futures


def has_ended(future: asyncio.Future[Any]) -> bool:
    """Whether it has a result or an error, so that `first_of` did not cancel it."""
    return future.done() and not future.cancelled()


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits until it has ended. Drops what it raises."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio would log it as never retrieved
