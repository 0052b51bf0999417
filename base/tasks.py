"""Background tasks of an event loop. The end of each one is noticed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tandem.base.errors import TandemError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0


class Tasks:
    """If a task of `spawn` raises, `failed` returns. A task of `keep` is started again. Must be constructed inside a running event
    loop."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], None] = {}  # in the order of their begin
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.restarts: dict[str, int] = {}  # of each task of `keep`, by name
        self.down: dict[str, str] = {}  # the tasks of `keep` that are not started again, and why they ended

    @property
    def failure(self) -> str:
        """Says which task died first and why; "" if none has."""
        return self._failure.result() if self._failure.done() else ""

    async def failed(self) -> str:
        """Returns the reason when a task has died. That is a bug, and its work is no longer done."""
        return await asyncio.shield(self._failure)

    def spawn(self, work: Coroutine[Any, Any, T], name: str, *, asked: bool = False) -> asyncio.Task[T]:
        """Starts `work`. With `asked` the caller awaits the result, so a TandemError is the caller's and no failure."""
        task = asyncio.create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(lambda ended: self._ended(ended, asked))
        return task

    def _ended(self, task: asyncio.Task[Any], asked: bool) -> None:
        self._running.pop(task, None)
        if task.cancelled() or task.exception() is None or self._failure.done():
            return
        if asked and isinstance(task.exception(), TandemError):
            return
        logger.error("%s died", task.get_name(), exc_info=task.exception())
        self._failure.set_result(f"{task.get_name()} died: {task.exception()!r}")

    def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` for as long as the process runs. That it ends is a fault: it is logged, counted, and the work is started again.
        After more than MAX_RESTARTS ends within RESTART_WINDOW_S it stays `down`."""
        self.restarts[name] = 0
        self.spawn(self._keep(name, work), name)

    async def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        clock = time.monotonic
        ends: list[float] = []
        while True:
            try:
                await work()
                reason = "it ended by itself"
            except asyncio.CancelledError:
                if (me := asyncio.current_task()) is None or me.cancelling():
                    raise
                reason = "what it waited for was cancelled"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                logger.exception("task %s died", name)
            ends = [at for at in ends if clock() - at < RESTART_WINDOW_S] + [clock()]
            if len(ends) > MAX_RESTARTS:
                self.down[name] = reason
                logger.error("task %s died %d times within %.0f s and stays down", name, len(ends), RESTART_WINDOW_S)
                return
            self.restarts[name] += 1
            logger.warning("task %s is started again: %s", name, reason)
            # a fault that repeats at once must not take the whole event loop
            await asyncio.sleep(0.05 * len(ends))

    async def stop(self) -> None:
        """Idempotent."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
