"""Every request passes the gate on its way in and out: its id, its key, its error body, its line in the log. Behind it the
request's route is found."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.base.errors import Cancelled, TandemError
from tandem.router.http.errors import (
    Unauthorized,
    body_of,
    error_body,
    from_http_exception,
    headers_of,
    sse_error,
    status_of,
)
from tandem.router.http.exchange import ErrorForm, HttpExchange, exchange_of, names_of, send_bytes
from tandem.router.http.hosts import OwnHosts
from tandem.router.http.services import Services
from tandem.router.keys import QuotaExceeded
from tandem.wire.requests import new_id

logger = logging.getLogger(__name__)

access_logger = logging.getLogger("router.access")

_REQUEST_ID = re.compile(rb"^[A-Za-z0-9._:-]{1,128}$")
_TRACE_PARENT = re.compile(rb"^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$")
_OPERATORS = frozenset({"/admin/{action}"})
# Paths for probes and scrapers, which have no key. They show nothing that needs one, and their successes are
# logged at debug level only.
_OPEN_PATHS = frozenset(
    {"/", "/health", "/healthz", "/live", "/ping", "/version", "/metrics", "/openapi.json", "/docs", "/ui"}
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

    def __init__(self, app: ASGIApp, services: Services, instead: Callable[[str], str | None]) -> None:
        """`instead`: says what is right in place of a path at which there is nothing."""
        self._app = app
        self._instead = instead
        self._error_forms = services.error_forms
        self._recent = services.dispatcher.recent
        self._keys = services.keys
        self._hosts = OwnHosts(services.config.host, services.config.cors_origins)
        self._metrics = services.metrics

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
                    self._metrics.refusals.inc("quota")
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
            is_news = exchange.status != 200 or scope["path"] not in _OPEN_PATHS
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
        if self._keys.required and exchange.scope["path"] not in _OPEN_PATHS:
            exchange.tenant = self._keys.find(_bearer(exchange.headers))
            if exchange.tenant is None:
                self._metrics.refusals.inc("unauthorized")
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
    body = form(error_body(f"internal error; the log has it under {exchange.request_id}", 500, "internal_error"))
    if exchange.status is None:
        await _answer(exchange, 500, body, {})
    elif exchange.is_stream and not exchange.ended:
        await exchange.send({"type": "http.response.body", "body": sse_error(body), "more_body": False})


async def _answer(exchange: HttpExchange, status: int, body: bytes, headers: dict[str, str]) -> None:
    plain = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send_bytes(exchange.send, body, b"application/json", status=status, headers=plain)
