"""What every request passes on its way in and out: its id, its caller, its error, its line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.http.errors import (
    Unauthorized,
    body_of,
    error_body,
    from_http_exception,
    headers_of,
    sse_error,
    status_of,
)
from tandem.router.http.exchange import HttpExchange, names_of
from tandem.router.keys import KeyRing
from tandem.router.metrics import RouterMetrics
from tandem.wire.errors import Cancelled, TandemError
from tandem.wire.requests import new_id

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("router.access")

_REQUEST_ID = re.compile(rb"^[A-Za-z0-9._:-]{1,128}$")
_TRACE_PARENT = re.compile(rb"^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$")
# Probes and scrapers have no key, and learn nothing here that needs one. Their successes are no news for the log.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/openapi.json", "/docs", "/ui"})


class HttpGate:
    """Outermost of ours. Whatever is raised inside becomes an error body, or an event when the answer has begun."""

    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: RouterMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope["exchange"] = _open(scope, receive, send)
        scope["app"] = self  # where there is one, Starlette's router raises what it would answer itself
        began = time.monotonic()

        try:
            try:
                self._admit(exchange)
                await self._app(scope, receive, exchange.send)
            except TandemError as error:
                await _answer_error(exchange, error)
            except HTTPException as error:
                body, more = from_http_exception(error, scope["method"], scope["path"])
                await _answer(exchange, error.status_code, exchange.error_form(body), more)
            except asyncio.CancelledError:
                exchange.status = exchange.status or Cancelled.http_status
                raise
            except Exception:
                logger.exception("%s: %s %s failed", exchange.request_id, scope["method"], _path(scope))
                await _answer_bug(exchange)
        finally:
            ended = time.monotonic()
            took = ended - began
            if exchange.trace is not None:
                exchange.trace.end(ended, exchange.route, exchange.status)
            self._metrics.note_answer(exchange.route, exchange.status)
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

    def _admit(self, exchange: HttpExchange) -> None:
        if self._keys.required and exchange.scope["path"] not in OPEN_PATHS:
            exchange.tenant = self._keys.find(_bearer(exchange.headers))
            if exchange.tenant is None:
                self._metrics.refusals.labels(reason="unauthorized").inc()
                raise Unauthorized(
                    "the Authorization header must be 'Bearer' and a valid API key, or x-api-key must be one"
                )


def _open(scope: Scope, receive: Receive, send: Send) -> HttpExchange:
    request_id, trace_id = None, None
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            request_id = value.decode("ascii")
        elif name == b"traceparent" and (match := _TRACE_PARENT.match(value)):
            trace_id = match[1].decode("ascii")
    return HttpExchange(scope, receive, send, request_id or new_id(), trace_id)


def _path(scope: Scope) -> str:
    """As it was sent, for logs: decoded it could hold a line break, and forge a line."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")[:500]


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":  # Anthropic's clients
            return value.strip()
    return b""


async def _answer_error(exchange: HttpExchange, error: TandemError) -> None:
    status = status_of(error)
    if exchange.status is not None:
        await _break_off(exchange, error)
        return
    if status >= 500:
        logger.warning("%s: answered %d: %s", exchange.request_id, status, error)
    await _answer(exchange, status, exchange.error_form(body_of(error)), headers_of(error))


async def _break_off(exchange: HttpExchange, error: TandemError) -> None:
    """The status is sent. A stream says what happened and ends without [DONE]; anything else is cut short."""
    if isinstance(error, Cancelled):
        exchange.status = Cancelled.http_status  # for the log and the metrics
    else:
        logger.warning("%s: failed mid-answer: %s", exchange.request_id, error)
    exchange.notes += f" error={error.code}"
    if exchange.is_stream and not exchange.ended:
        event = sse_error(exchange.error_form(body_of(error)))
        await exchange.send({"type": "http.response.body", "body": event, "more_body": False})


async def _answer_bug(exchange: HttpExchange) -> None:
    body = exchange.error_form(
        error_body(f"internal error; the log has it under {exchange.request_id}", 500, "internal_error")
    )
    if exchange.status is None:
        await _answer(exchange, 500, body, {})
    elif exchange.is_stream and not exchange.ended:
        await exchange.send({"type": "http.response.body", "body": sse_error(body), "more_body": False})


async def _answer(exchange: HttpExchange, status: int, body: bytes, headers: dict[str, str]) -> None:
    plain = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *plain]
    await exchange.send({"type": "http.response.start", "status": status, "headers": start})
    await exchange.send({"type": "http.response.body", "body": body, "more_body": False})
