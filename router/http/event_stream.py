"""Server-sent events to clients of any speed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope, Send

from router.http.gate import exchange_of

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """What the server's own protocol offers beyond ASGI."""

    def try_write_chunk(self, data: bytes) -> bool: ...

    async def until_writable(self) -> None: ...

    def abort(self) -> None: ...


class EventStream:
    """One answer's events. `began_write` is set while a write waits for the client: the watch looks at it."""

    def __init__(
        self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]], watch: SlowReaderWatch
    ) -> None:
        self._exchange = exchange_of(scope)
        self._connection: Connection = scope["state"]["connection"]
        self._chunked = scope["http_version"] == "1.1"  # as the answer then is, having no length
        self._send = send
        self._headers = headers
        self._watch = watch
        self.began_write: float | None = None
        self.cut = False

    @property
    def begun(self) -> bool:
        return self._exchange.status is not None

    def try_write(self, events: bytes) -> bool:
        """At once, or not at all: when the answer has not begun, or the client is behind."""
        return self._chunked and self.begun and self._connection.try_write_chunk(events)

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """The first write sends the status: until then a failure is still a status code."""
        if not last and self.try_write(events):
            return
        if not self.begun:
            await self._begin()
        self.began_write = self._watch.now()
        try:
            await self._connection.until_writable()
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})
        finally:
            self.began_write = None

    async def _begin(self) -> None:
        self._exchange.is_stream = True
        self._watch.streams.add(self)
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self._headers,
                ],
            }
        )

    def close(self) -> None:
        self._watch.streams.discard(self)

    def abort(self) -> None:
        """The connection's buffer will never empty, so closing it would wait forever."""
        self.cut = True
        self._connection.abort()  # which the request's handler sees as a client that went away


class SlowReaderWatch:
    """Looks over all streams once in a while: a deadline per write would cost every token a timer."""

    def __init__(self, limit_s: float, on_cut: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_cut = on_cut
        self.streams: set[EventStream] = set()

    def now(self) -> float:
        return time.monotonic()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._limit_s / 4))
            oldest = self.now() - self._limit_s
            for stream in list(self.streams):
                if not stream.cut and stream.began_write is not None and stream.began_write < oldest:
                    logger.warning(
                        "a client took nothing of its stream for %.0f s and is cut off", self._limit_s
                    )
                    self._on_cut()
                    stream.abort()
