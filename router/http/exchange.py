"""One request and its answer, as handlers and the log see them.

Handlers send an answer here: whole, in pieces if it is long, or as server-sent events. Every request passes
the gate on its way in and out: its id, its key, its error body, its line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.api.openai.answer import LoopTurn
from tandem.base.errors import Cancelled, InvalidRequest, TandemError
from tandem.router.http.errors import (
    Forbidden,
    Unauthorized,
    body_of,
    error_body,
    from_http_exception,
    headers_of,
    sse_error,
    status_of,
)
from tandem.router.http.hosts import OwnHosts
from tandem.router.keys import KeyRing, QuotaExceeded, Tenant
from tandem.router.metrics import RouterMetrics
from tandem.router.recent import RecentRequests
from tandem.router.tracer import ASK_HEADER, GrowingTrace
from tandem.wire.requests import new_id

logger = logging.getLogger(__name__)

access_logger = logging.getLogger("router.access")

_REQUEST_ID = re.compile(rb"^[A-Za-z0-9._:-]{1,128}$")
_TRACE_PARENT = re.compile(rb"^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$")
# Paths for probes and scrapers, which have no key. They show nothing that needs one, and their successes are
# logged at debug level only.
_OPERATORS = frozenset({"/admin/{action}"})
OPEN_PATHS = frozenset(
    {"/", "/health", "/healthz", "/live", "/ping", "/version", "/metrics", "/openapi.json", "/docs", "/ui"}
)


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

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, trace_id: str | None
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._by_name = dict(reversed(self.headers))
        self.connection: Connection = scope["state"]["connection"]
        self.request_id = request_id
        self.trace_id = trace_id
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

    def first_by(self, arrived: float) -> float | None:
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
        return arrived + seconds

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


def exchange_of(scope: Scope) -> HttpExchange:
    found = scope["exchange"]
    if not isinstance(found, HttpExchange):
        raise TypeError("the request did not come through the gate")
    return found


def names_of(fields: list[str]) -> bytes:
    """Makes clients' field names fit for a header and a log line: at most a kilobyte of printable ASCII."""
    return re.sub(rb"[^!-~]", b"?", b",".join(name.encode("ascii", "replace")[:100] for name in fields))[
        :1024
    ]


# A larger answer is sent while it is made, chunked and without a length, as fast as the client reads.
WHOLE_BYTES = 256 << 10
_WRITE_BYTES = 64 << 10


async def send_json(
    send: Send, body: Any, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await send_bytes(send, msgspec.json.encode(body), b"application/json", status=status, headers=headers)


async def send_bytes(
    send: Send,
    body: bytes,
    content_type: bytes,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
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


async def send_pieces(
    send: Send, pieces: Iterator[bytes], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
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


class HttpRoute:
    """A handler as an ASGI application. It notes the route in the exchange, which labels metrics instead of
    clients' paths."""

    def __init__(
        self,
        path: str,
        answer: Callable[[HttpExchange], Awaitable[None]],
        answer_instead: Callable[[HttpExchange, TandemError], Awaitable[bool]],
    ) -> None:
        """`answer_instead`: may answer an error in another way; returns whether it did."""
        self._path = path
        self._answer = answer
        self._answer_instead = answer_instead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.route = self._path
        try:
            await self._answer(exchange)
        except TandemError as error:
            if not await self._answer_instead(exchange, error):
                raise


class HttpRoutes:
    """Finds a request's route. A path without parameters is looked up in a table; Starlette's router tries
    the others in turn."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact = {
            (route.path, method): route.app
            for route in routes
            for method in route.methods or ()
            if "{" not in route.path
        }
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._exact.get((scope["path"], scope["method"]), self._router)
        await app(scope, receive, send)


class HttpGate:
    """The outermost layer of the application. An error raised inside becomes an error body, or an event if a
    stream has begun."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        metrics: RouterMetrics,
        hosts: OwnHosts,
        recent: RecentRequests,
        instead: Callable[[str], str | None],
        error_forms: Sequence[tuple[str, ErrorForm]] = (),
    ) -> None:
        """`instead`: says what is right in place of a path at which there is nothing. `error_forms`: by the
        beginning of a path, where an API writes errors in its own way."""
        self._app = app
        self._error_forms = error_forms
        self._recent = recent
        self._instead = instead
        self._keys = keys
        self._hosts = hosts
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope["exchange"] = _open(scope, receive, send)
        # with an "app" in the scope, Starlette's router raises errors instead of answering them itself
        scope["app"] = self
        began = time.monotonic()

        try:
            try:
                self._admit(exchange)
                await self._app(scope, receive, exchange.send)
            except TandemError as error:
                if isinstance(error, QuotaExceeded):
                    self._metrics.refusals.labels(reason="quota").inc()
                exchange.trouble = (error.code, str(error))
                await _answer_error(exchange, error, self._error_form(exchange))
            except HTTPException as error:
                exchange.trouble = ("not_found", str(error.detail))
                path = scope["path"]
                body, more = from_http_exception(error, scope["method"], path, self._instead(path))
                await _answer(exchange, error.status_code, self._error_form(exchange)(body), more)
            except asyncio.CancelledError:
                exchange.status = exchange.status or Cancelled.http_status
                raise
            except Exception:
                exchange.trouble = ("internal_error", "a bug: the router's log has it")
                logger.exception("%s: %s %s failed", exchange.request_id, scope["method"], _path(scope))
                await _answer_bug(exchange, self._error_form(exchange))
        finally:
            if exchange.is_counted:
                exchange.connection.leave(exchange.owner)
            ended = time.monotonic()
            took = ended - began
            if exchange.trace is not None:
                exchange.trace.end(ended, exchange.route, exchange.status)
            self._metrics.note_answer(exchange.route, exchange.status)
            # Requests are posted; what a page or a probe is refused is no trouble.
            if exchange.trouble and scope["method"] == "POST" and exchange.route not in _OPERATORS:
                self._recent.answered(exchange.request_id, exchange.status or 0, *exchange.trouble)
            is_news = exchange.status != 200 or scope["path"] not in OPEN_PATHS
            access_logger.log(
                logging.INFO if is_news else logging.DEBUG,
                "%s %s %s %s %.3fs%s%s%s%s",
                exchange.request_id, scope["method"], _path(scope), exchange.status, took,
                f" key={exchange.tenant.name}" if exchange.tenant else "",
                f" trace={exchange.trace_id}" if exchange.trace_id else "",
                exchange.notes,
                f" ignored={names_of(exchange.ignored_fields).decode()}" if exchange.ignored_fields else "",
            )  # fmt: skip

    def _error_form(self, exchange: HttpExchange) -> ErrorForm:
        path = exchange.scope["path"]
        return next((form for begins, form in self._error_forms if path.startswith(begins)), bytes)

    def _admit(self, exchange: HttpExchange) -> None:
        if self._keys.required and exchange.scope["path"] not in OPEN_PATHS:
            exchange.tenant = self._keys.find(_bearer(exchange.headers))
            if exchange.tenant is None:
                self._metrics.refusals.labels(reason="unauthorized").inc()
                raise Unauthorized(
                    "the Authorization header must be 'Bearer' and a valid API key, or x-api-key must be one"
                )
            exchange.connection.enter(exchange.owner)
            exchange.is_counted = True
        elif not self._keys.required:
            self._hosts.check(exchange.header(b"host"))


def _open(scope: Scope, receive: Receive, send: Send) -> HttpExchange:
    request_id, trace_id = None, None
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            request_id = value.decode("ascii")
        elif name == b"traceparent" and (match := _TRACE_PARENT.match(value)):
            trace_id = match[1].decode("ascii")
    return HttpExchange(scope, receive, send, request_id or new_id(), trace_id)


def _path(scope: Scope) -> str:
    """The path as it was sent. Decoded, it could hold a line break and forge a line of the log."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")[:500]


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":  # sent by Anthropic's clients
            return value.strip()
    return b""


async def _answer_error(exchange: HttpExchange, error: TandemError, form: ErrorForm) -> None:
    status = status_of(error)
    if exchange.status is not None:
        await _break_off(exchange, error, form)
        return
    if status >= 500:
        logger.warning("%s: answered %d: %s", exchange.request_id, status, error)
    await _answer(exchange, status, form(body_of(error)), headers_of(error))


async def _break_off(exchange: HttpExchange, error: TandemError, form: ErrorForm) -> None:
    """Ends an answer whose status was sent. A stream gets an error event and no [DONE]; any other answer is
    cut short."""
    if isinstance(error, Cancelled):
        exchange.status = Cancelled.http_status  # for the log and the metrics
    else:
        logger.warning("%s: failed mid-answer: %s", exchange.request_id, error)
    exchange.notes += f" error={error.code}"
    if exchange.is_stream and not exchange.ended:
        event = sse_error(form(body_of(error)))
        await exchange.send({"type": "http.response.body", "body": event, "more_body": False})


async def _answer_bug(exchange: HttpExchange, form: ErrorForm) -> None:
    body = form(
        error_body(f"internal error; the log has it under {exchange.request_id}", 500, "internal_error")
    )
    if exchange.status is None:
        await _answer(exchange, 500, body, {})
    elif exchange.is_stream and not exchange.ended:
        await exchange.send({"type": "http.response.body", "body": sse_error(body), "more_body": False})


async def _answer(exchange: HttpExchange, status: int, body: bytes, headers: dict[str, str]) -> None:
    plain = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send_bytes(exchange.send, body, b"application/json", status=status, headers=plain)
