"""Time as the controller sees it, so that a test can be the one who lets it pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from tandem.wire.errors import DeadlineExceeded

T = TypeVar("T")


class Clock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T], what: str) -> T:
        """The work's result, or DeadlineExceeded: "`what` took longer than ..."."""
        task = asyncio.ensure_future(work)
        alarm = asyncio.ensure_future(self.sleep(seconds))
        try:
            await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise DeadlineExceeded(f"{what} took longer than {seconds:g} s")
        finally:
            await cancel(task)
            await cancel(alarm)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Ends a task and waits until it has ended; what it raises then interests nobody any more."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: asyncio would log it as lost
