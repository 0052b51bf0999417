"""Runs background tasks, and notices when one ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0


class TaskSupervisor:
    """Runs named tasks for as long as the router runs.

    A task that ends by itself is a fault: it is logged, counted, and started again. After more than
    MAX_RESTARTS ends within RESTART_WINDOW_S it stays down, and `failed` names it, which makes /health answer
    503.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.restarts: dict[str, int] = {}
        self.failed: dict[str, str] = {}

    def run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self.restarts[name] = 0
        self._tasks[name] = asyncio.get_running_loop().create_task(self._watch(name, work), name=name)

    async def _watch(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        clock = time.monotonic
        ends: list[float] = []
        while True:
            try:
                await work()
                reason = "it ended by itself"
            except asyncio.CancelledError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                logger.exception("task %s died", name)
            ends = [at for at in ends if clock() - at < RESTART_WINDOW_S] + [clock()]
            if len(ends) > MAX_RESTARTS:
                self.failed[name] = reason
                logger.error(
                    "task %s died %d times within %.0f s and stays down", name, len(ends), RESTART_WINDOW_S
                )
                return
            self.restarts[name] += 1
            logger.warning("task %s is started again: %s", name, reason)
            # a fault that repeats at once must not take the whole event loop
            await asyncio.sleep(0.05 * len(ends))

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
