"""One line of a batch as a request of this router: the same handlers answer it, with its key's cache and names.

It has no connection. It counts against none of its key's quotas, and everything that it asks of nodes is asked for when
they are idle.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Message

from tandem.api.batches.lines import body_of_line
from tandem.base.errors import TandemError
from tandem.router.http.errors import body_of, status_of
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services
from tandem.router.keys import Tenant
from tandem.wire.requests import new_id

LineHandler = Callable[[Services, HttpExchange], Awaitable[None]]


class _Streaming(msgspec.Struct):
    stream: object = None


_streaming = msgspec.json.Decoder(_Streaming)


class LineAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    request_id: str
    begun: bool  # nodes have worked on it


class LineConnection:
    """Stands where a request has its connection. Its reader never is behind, and never goes away. The line's text is here
    until the handler takes its body: a line may run for a day."""

    def __init__(self, data: bytes) -> None:
        self._body: bytes | None = body_of_line(data)

    @property
    def asks_for_a_stream(self) -> bool:
        return self._body is not None and bool(_streaming.decode(self._body).stream)

    def whole_body(self) -> bytes | None:
        body, self._body = self._body, None
        return body

    def watch(self, on_lost: Callable[[], None]) -> None: ...
    def unwatch(self) -> None: ...
    def try_write_chunk(self, data: bytes) -> bool:
        return False

    async def until_writable(self) -> None: ...
    def enter(self, owner: str) -> None: ...
    def leave(self, owner: str) -> None: ...


async def answer_line(
    services: Services, handler: LineHandler, path: str, connection: LineConnection, tenant: Tenant | None
) -> LineAnswer:
    """Returns the answer, which may be an error's. An error that is no TandemError is raised: it is a bug."""
    parts: list[bytes] = []
    status = 0

    async def receive() -> Message:
        return {"type": "http.request", "body": connection.whole_body() or b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")],
        "state": {"connection": connection},
    }
    exchange = HttpExchange(scope, receive, send, f"batch-{new_id()}", None)
    exchange.tenant, exchange.when_idle, exchange.route = tenant, True, path
    try:
        await handler(services, exchange)
    except TandemError as error:
        form = next((form for begins, form in services.error_forms if path.startswith(begins)), bytes)
        status, parts = status_of(error), [form(body_of(error))]
    finally:
        if exchange.trace is not None:
            exchange.trace.end(time.monotonic(), path, status)
    # A handler notes for the log which nodes have worked on a request.
    return LineAnswer(status, b"".join(parts), exchange.request_id, begun=bool(exchange.notes))
