"""Every error as the client sees it. Only this module makes error bodies.

Errors that exist only in HTTP are defined here, under RequestError; all others come from `base.errors`.
"""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException

from tandem.api.openai.prompts import PromptTooLong
from tandem.base.errors import InvalidRequest, RequestError, TandemError, Unavailable, UnknownModel
from tandem.router.dispatch.expected_wait import QueueFull
from tandem.router.keys import QuotaExceeded


class Unauthorized(RequestError):
    code = "invalid_api_key"
    http_status = 401


class Forbidden(RequestError):
    code = "permission_denied"
    http_status = 403


class BodyTimeout(RequestError):
    code = "request_timeout"
    http_status = 408


class BodyTooLarge(RequestError):
    code = "request_too_large"
    http_status = 413


class UnsupportedContentType(RequestError):
    code = "unsupported_media_type"
    http_status = 415


class RouterDraining(Unavailable):
    """This router finishes its requests and takes no new ones; its successor does."""

    code = "draining"


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}

DEFAULT_RETRY_AFTER_S = 1
# Messages quote what was sent, and an unknown name may be as long as a body.
_LONGEST_MESSAGE = 2000
_LONGEST_PARAM = 200


def error_type(status: int) -> str:
    if status in _TYPES:
        return _TYPES[status]
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(message: str, status: int, code: str | None, param: str | None = None) -> bytes:
    if param is not None:
        param = param[:_LONGEST_PARAM]
    return msgspec.json.encode(
        {"error": {"message": _shortened(message), "type": error_type(status), "param": param, "code": code}}
    )


def _shortened(message: str) -> str:
    """Cuts a message in its middle: what is wrong stands at its beginning, and what would be right often at
    its end."""
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]} … {message[-half:]}"


def status_of(error: TandemError) -> int:
    """A lost node without a replacement is a 502: the router is not busy, so a 503 would be wrong."""
    return 502 if error.code == "node_lost" else error.http_status


def body_of(error: TandemError) -> bytes:
    param: str | None = None
    if isinstance(error, InvalidRequest):
        param = error.param
    elif isinstance(error, UnknownModel):
        param = "model"
    elif isinstance(error, PromptTooLong):
        param = error.param
    return error_body(str(error), status_of(error), error.code, param)


def headers_of(error: TandemError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if isinstance(error, QuotaExceeded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, QueueFull):
        headers["retry-after"] = str(error.retry_after_s)
    elif status_of(error) == 503:
        headers["retry-after"] = str(DEFAULT_RETRY_AFTER_S)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTimeout | BodyTooLarge | RouterDraining):
        headers["connection"] = "close"  # what follows on this connection may be the rest of the body
    return headers


def sse_error(body: bytes) -> bytes:
    """Makes the event that reports an error in the middle of a stream, after the status was sent."""
    return b"event: error\ndata: " + body + b"\n\n"


def from_http_exception(
    error: HTTPException, method: str, path: str, instead: str | None
) -> tuple[bytes, dict[str, str]]:
    headers: dict[str, str] = dict(error.headers or {})
    if error.status_code == 404:
        hint = f"; {instead}" if instead is not None else ""
        return error_body(f"there is nothing at {path[:200]}{hint}", 404, "not_found"), headers
    if error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", "another method"))
        return error_body(
            f"{method[:20]} is not allowed at {path[:200]}; use {allowed}", 405, "method_not_allowed"
        ), headers
    return error_body(str(error.detail), error.status_code, None), headers
