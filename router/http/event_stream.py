"""Server-sent events to clients of any speed."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope, Send

from tandem.router.http.gate import exchange_of


class StreamConnection(Protocol):
    """What the server's own protocol offers beyond ASGI. It cuts off who does not read, which ends every wait here."""

    def try_write_chunk(self, data: bytes) -> bool: ...

    async def until_writable(self) -> None: ...


class EventStream:
    """One answer's events."""

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._exchange = exchange_of(scope)
        self._connection: StreamConnection = scope["state"]["connection"]
        self._chunked = scope["http_version"] == "1.1"  # as the answer then is, having no length
        self._send = send
        self._headers = headers

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
        await self._connection.until_writable()
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def _begin(self) -> None:
        self._exchange.is_stream = True
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
