"""A client that goes away takes its request with it, in whatever phase it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Scope

from tandem.wire.errors import Cancelled


class WatchedConnection(Protocol):
    """What the server's own protocol offers beyond ASGI: without it, watching would take a task per request."""

    def watch(self, on_lost: Callable[[], None]) -> None: ...

    def unwatch(self) -> None: ...


async def until_disconnect(scope: Scope, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` in this task; if the client goes away first, cancel it and raise Cancelled."""
    connection: WatchedConnection = scope["state"]["connection"]
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("until_disconnect() outside a task")
    went_away = False

    def on_lost() -> None:
        nonlocal went_away
        went_away = True
        task.cancel()

    connection.watch(on_lost)
    try:
        await work()
    except asyncio.CancelledError:
        if not went_away or task.uncancel() > 0:
            raise
        raise Cancelled("the client went away") from None
    finally:
        connection.unwatch()
