"""Async tests: each runs on an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

PATIENCE_S = 60.0  # long enough for a busy machine; it only ends a test that hangs


def in_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test within a deadline, and fails it if it leaves a task behind. `conftest.py` does so with each that is async; what
    hypothesis calls needs this decorator."""

    @functools.wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        async def run() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(*args, **kwargs)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"the test left tasks behind: {left}"

        asyncio.run(run())

    return test
