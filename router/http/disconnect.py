"""A client that goes away takes its request with it, in whatever phase it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive

from wire.errors import Cancelled


async def until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` in this task; if the client goes away first, cancel it and raise Cancelled."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("until_disconnect() outside a task")
    went_away = False

    async def watch() -> None:
        nonlocal went_away
        while (await receive())["type"] != "http.disconnect":
            pass
        went_away = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work()
    except asyncio.CancelledError:
        if not went_away or task.uncancel() > 0:
            raise
        raise Cancelled("the client went away") from None
    finally:
        watcher.cancel()
