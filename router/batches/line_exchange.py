"""One line of a batch as a request of this router: the same handlers answer it, with its key's cache and names.

It has no connection. It counts against none of its key's quotas, and everything that it asks of nodes is asked for when
they are idle.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Message

from tandem.base.errors import TandemError
from tandem.router.http.errors import body_of, status_of
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services
from tandem.router.keys import Tenant
from tandem.wire.requests import new_id

LineHandler = Callable[[Services, HttpExchange], Awaitable[None]]


class LineAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    request_id: str
    begun: bool  # nodes have worked on it


class _NoConnection:
    """Stands where a request has its connection. Its reader never is behind, and never goes away."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def whole_body(self) -> bytes | None:
        return self._body

    def watch(self, on_lost: Callable[[], None]) -> None: ...
    def unwatch(self) -> None: ...
    def try_write_chunk(self, data: bytes) -> bool:
        return False

    async def until_writable(self) -> None: ...
    def enter(self, owner: str) -> None: ...
    def leave(self, owner: str) -> None: ...


async def answer_line(
    services: Services, handler: LineHandler, path: str, body: bytes, tenant: Tenant | None
) -> LineAnswer:
    """Returns the answer, which may be an error's. An error that is no TandemError is raised: it is a bug."""
    parts: list[bytes] = []
    status = 0

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

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
        "state": {"connection": _NoConnection(body)},
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
