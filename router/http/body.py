"""A request's body: of the right type, not too large, not too slow; then parsed and checked."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from tandem.router.config import Limits, RouterConfig, Timeouts
from tandem.router.http.errors import BodyTimeout, BodyTooLarge, UnsupportedContentType
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.json_body import parse_object
from tandem.router.http.memory import BodyShare
from tandem.router.openai.checking import read_request
from tandem.wire.errors import Cancelled, InvalidRequest

R = TypeVar("R", bound=msgspec.Struct)

# Parsing more than this takes a millisecond or more.
INLINE_BYTES = 64 << 10


async def read_body(
    exchange: HttpExchange, request_type: type[R], config: RouterConfig, share: BodyShare
) -> R:
    _check_type(exchange)
    body = await _read(exchange, config.limits, config.timeouts, share)
    if len(body) <= INLINE_BYTES:
        request, ignored = _request_of(body, request_type, config)
    else:
        async with share.parsing:
            request, ignored = await asyncio.to_thread(_request_of, body, request_type, config)
    exchange.ignored_fields = ignored
    if config.other_models and getattr(request, "model", None) in config.other_models:
        exchange.body = body
    return request


async def read_bytes(exchange: HttpExchange, config: RouterConfig, share: BodyShare) -> bytes | bytearray:
    """A body of JSON that is parsed elsewhere."""
    _check_type(exchange)
    return await _read(exchange, config.limits, config.timeouts, share)


def _request_of(body: bytes | bytearray, request_type: type[R], config: RouterConfig) -> tuple[R, list[str]]:
    value = parse_object(body, config.limits)
    return read_request(value, request_type, config.unknown_fields)


def _header(exchange: HttpExchange, wanted: bytes) -> bytes | None:
    for name, value in exchange.headers:
        if name == wanted:
            return bytes(value)
    return None


def _check_type(exchange: HttpExchange) -> None:
    declared = _header(exchange, b"content-type")
    if declared is None:
        return
    kind, _, parameters = declared.decode("latin-1").partition(";")
    if kind.strip().lower() != "application/json":
        raise UnsupportedContentType(f"content-type: must be application/json, not {kind.strip()[:100]!r}")
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise UnsupportedContentType(f"content-type: JSON is UTF-8, not {value.strip()[:40]!r}")
    encoding = _header(exchange, b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise UnsupportedContentType(
            f"content-encoding: {encoding.decode('latin-1')[:40]!r} is not read here"
        )


async def _read(
    exchange: HttpExchange, limits: Limits, timeouts: Timeouts, share: BodyShare
) -> bytes | bytearray:
    declared = _header(exchange, b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared) > limits.body_bytes):
        if not declared.isdigit():
            raise InvalidRequest("content-length: must be a number")
        raise BodyTooLarge(f"the body has {int(declared)} bytes; at most {limits.body_bytes} are read")
    # What came together with its head is here already, as most bodies are: no wait, so no timer.
    whole = exchange.connection.whole_body()
    if whole is not None:
        if len(whole) > limits.body_bytes:
            raise BodyTooLarge(f"the body has {len(whole)} bytes; at most {limits.body_bytes} are read")
        share.take(len(whole))
        return whole
    body = bytearray()
    more, fits = True, True
    try:
        async with asyncio.timeout(timeouts.body):
            while more and fits:
                message = await _next(exchange.receive)
                data = message.get("body", b"")
                more = message.get("more_body", False)
                fits = len(body) + len(data) <= limits.body_bytes
                if fits:
                    share.take(len(data))
                    body += data
    except TimeoutError:
        raise BodyTimeout(f"the body was not complete within {timeouts.body:g} s") from None
    if fits:
        return body
    raise BodyTooLarge(f"the body has more than the {limits.body_bytes} bytes that are read")


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Cancelled("the client went away before its body was complete") from ClientDisconnect()
    return message
