"""One request and its answer, as handlers and the log see them.

Handlers send an answer here: whole, in pieces if it is long, or as server-sent events.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from tandem.api.openai.answer import LoopTurn
from tandem.base.errors import Cancelled, InvalidRequest
from tandem.router.http.errors import Forbidden
from tandem.router.keys import KeyRing, Tenant
from tandem.router.tracer import ASK_HEADER, GrowingTrace

IDLE_OWNER = "\0"  # no key's name
ErrorForm = Callable[[bytes], bytes]  # from an error's body in OpenAI's form to that in another API's


class Connection(Protocol):
    """What the server's connection offers beyond ASGI. The server cuts off a client that does not read, which
    ends every wait here."""

    def whole_body(self) -> bytes | None: ...

    def watch(self, on_lost: Callable[[], None]) -> None: ...

    def unwatch(self) -> None: ...

    def try_write_chunk(self, data: bytes) -> bool: ...

    async def until_writable(self) -> None: ...

    def enter(self, owner: str) -> None: ...

    def leave(self, owner: str) -> None: ...


class HttpExchange:
    """One request and its answer. A handler is a function of the router's services and an exchange."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, trace_id: str | None) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._by_name = dict(reversed(self.headers))
        self.connection: Connection = scope["state"]["connection"]
        self.request_id = request_id
        self.trace_id = trace_id
        self.arrived = time.monotonic()  # of several requests on a connection: the last one
        self.tenant: Tenant | None = None
        self.when_idle = False  # a line of a batch: its sequences run while nothing else does
        self.is_counted = False  # among the requests in progress of its key
        self.route = "other"  # a metric's label; never a path that a client chose
        self.notes = ""  # for the log: nodes and token counts
        self.trouble: tuple[str, str] | None = None  # the code and text of its error
        self.ignored_fields: list[str] = []  # fields of the request that this server does not know
        self.status: int | None = None
        self.ended = False  # the answer's last byte was sent
        self.is_stream = False
        self.trace: GrowingTrace | None = None
        self.body: bytes | bytearray = b""  # kept only when the request is to be passed on

    @property
    def asks_for_trace(self) -> bool:
        """Whether a client or its tracing system wants a trace, or says that it wants none."""
        return b"traceparent" in self._by_name or ASK_HEADER in self._by_name

    @property
    def owner(self) -> str:
        """The name of the request's key; "" where there are no keys. What runs when nothing else does has no part in its
        key's shares: all of it is one owner, which leaves the others theirs."""
        if self.when_idle:
            return IDLE_OWNER
        return self.tenant.name if self.tenant is not None else ""

    def header(self, name: bytes) -> bytes | None:
        return self._by_name.get(name)

    @property
    def first_by(self) -> float | None:
        """When the client wants the first token: `X-Tandem-Deadline` seconds after its request arrived."""
        asked = self.header(b"x-tandem-deadline")
        if asked is None:
            return None
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            wrong = asked[:100].decode("latin-1")
            raise InvalidRequest(
                f"X-Tandem-Deadline must be a number of seconds above 0, not {wrong!r}", "x-tandem-deadline"
            )
        return self.arrived + seconds

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode())]
            if self.ignored_fields:
                message["headers"].append((b"x-tandem-ignored-fields", names_of(self.ignored_fields)))
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)

    async def until_disconnect(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` in this task. If the client disconnects, `work` is cancelled and Cancelled is
        raised."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("until_disconnect() outside a task")
        went_away = False

        def on_lost() -> None:
            nonlocal went_away
            went_away = True
            task.cancel()

        self.connection.watch(on_lost)
        try:
            await work()
        except asyncio.CancelledError:
            if not went_away or task.uncancel() > 0:
                raise
            raise Cancelled("the client went away") from None
        finally:
            self.connection.unwatch()

    def is_from_elsewhere(self, allowed: tuple[str, ...]) -> bool:
        """Whether a page of another site sent it, which is none of `allowed` (`router.cors_origins`). Browsers
        say whose page asks; other clients say nothing."""
        origin = self.header(b"origin")
        if origin is None or "*" in allowed or origin.decode("latin-1") in allowed:
            return False
        return origin.partition(b"://")[2] != self.header(b"host")

    def require_operator(self, keys: KeyRing) -> None:
        """Raises Forbidden for a tenant's key. Where keys are set, only operators see the cluster and other
        tenants' data."""
        if keys.required and (self.tenant is None or not self.tenant.is_operator):
            raise Forbidden(
                f"{self.scope['path'][:100]} needs an operator's key: one of router.api_keys that says operator: true"
            )


class Query:
    """The part of its URL behind the question mark."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._values = parse_qs(exchange.scope["query_string"].decode("latin-1"))

    def text(self, name: str) -> str | None:
        return self._values.get(name, [None])[0] or None

    def number(self, name: str, usual: int, most: int) -> int:
        text = self.text(name)
        if text is None:
            return usual
        if re.fullmatch("[0-9]{1,6}", text) is None or not 1 <= int(text) <= most:
            raise InvalidRequest(f"{name}: must be from 1 to {most}, not {text[:40]!r}", name)
        return int(text)


def exchange_of(scope: Scope) -> HttpExchange:
    found = scope["exchange"]
    if not isinstance(found, HttpExchange):
        raise TypeError("the request did not come through the gate")
    return found


def names_of(fields: list[str]) -> bytes:
    """Makes clients' field names fit for a header and a log line: at most a kilobyte of printable ASCII."""
    return re.sub(rb"[^!-~]", b"?", b",".join(name.encode("ascii", "replace")[:100] for name in fields))[:1024]


# A larger answer is sent while it is made, chunked and without a length, as fast as the client reads.
WHOLE_BYTES = 256 << 10
_WRITE_BYTES = 64 << 10


async def send_json(send: Send, body: Any, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await send_bytes(send, msgspec.json.encode(body), b"application/json", status=status, headers=headers)


async def send_bytes(
    send: Send, body: bytes, content_type: bytes, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})


# Of pages. Nothing is loaded from elsewhere. No other page may frame one, because they have buttons and a
# field for a key.
_PAGE_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = (
    (b"content-security-policy", _PAGE_POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


async def send_page(send: Send, page: bytes) -> None:
    await send_bytes(send, page, b"text/html; charset=utf-8", headers=_PAGE_HEADERS)


async def send_pieces(send: Send, pieces: Iterator[bytes], headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends an answer made of pieces, and lets the event loop go on in between. `send` waits for a client
    that is behind."""
    turn = LoopTurn()
    ready: list[bytes] = []
    size, begun = 0, False
    for piece in pieces:
        ready.append(piece)
        size += len(piece)
        if size > (_WRITE_BYTES if begun else WHOLE_BYTES):
            if not begun:
                begun = True
                start = [(b"content-type", b"application/json"), *headers]
                await send({"type": "http.response.start", "status": 200, "headers": start})
            await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
            ready.clear()
            size = 0
        await turn.pass_on()
    if begun:
        await send({"type": "http.response.body", "body": b"".join(ready), "more_body": False})
    else:
        await send_bytes(send, b"".join(ready), b"application/json", headers=headers)


class EventStream:
    """A stream of server-sent events to one client. The server cuts off a client that does not read, which
    ends every wait here."""

    def __init__(self, exchange: HttpExchange, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._exchange = exchange
        self._connection = exchange.connection
        # an HTTP/1.1 answer without a length is chunked
        self._chunked = exchange.scope["http_version"] == "1.1"
        self._headers = headers

    @property
    def begun(self) -> bool:
        """Whether the status was sent. After it, a failure can no longer be a status code."""
        return self._exchange.status is not None

    def try_write(self, events: bytes) -> bool:
        """Writes at once and returns True, or returns False when the stream has not begun or the client is
        behind."""
        return self._chunked and self.begun and self._connection.try_write_chunk(events)

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Writes events, and waits for a client that is behind. The first write sends the status."""
        if not last and self.try_write(events):
            return
        if not self.begun:
            await self._begin()
        await self._connection.until_writable()
        await self._exchange.send({"type": "http.response.body", "body": events, "more_body": not last})

    async def _begin(self) -> None:
        self._exchange.is_stream = True
        await self._exchange.send(
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
