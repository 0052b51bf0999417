"""One rendering of a costly answer for all who ask for it at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# Prometheus asks every few seconds at most, so no scraper gets the same answer twice.
SERVES_S = 0.5


class SharedRendering:
    """Renders one at a time. Who asks during a rendering waits for it, and it serves for SERVES_S more. So
    however many ask, the cost is that of two renderings a second at most."""

    def __init__(self, render: Callable[[], Awaitable[bytes]], clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._rendering: asyncio.Task[bytes] | None = None
        self._last = b""
        self._serves_until = 0.0

    async def get(self) -> bytes:
        if self._clock() < self._serves_until:
            return self._last
        if self._rendering is None:
            self._rendering = asyncio.create_task(self._make())
        # Who goes away while it is made must not end it for the others.
        return await asyncio.shield(self._rendering)

    async def _make(self) -> bytes:
        try:
            self._last = await self._render()
            self._serves_until = self._clock() + SERVES_S
            return self._last
        finally:
            self._rendering = None
