"""One request and its answer on a connection, as an ASGI application sees them: the head, HTTP/1.1 framing,
and nothing of other requests.

httptools (llhttp) reads the head. What it accepts although two readers could disagree about where the request
ends is refused here.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from tandem.base.errors import InternalError
from tandem.http_server.chunked import ChunkedBody, FramingError
from tandem.http_server.turns import Turns

logger = logging.getLogger(__name__)

END_OF_HEAD = re.compile(rb"\n\r?\n")
_BOTH = "Transfer-Encoding and Content-Length together; send one of them"
_BETTER = {  # replaces messages of llhttp that do not say what would be right
    "Transfer-Encoding can't be present with Content-Length": _BOTH,
    "Content-Length can't be present with Transfer-Encoding": _BOTH,
}
_LENGTH = re.compile(rb"[0-9]{1,18}")
# Body bytes that the application has not read yet. Beyond this the connection stops reading.
UNREAD_BYTES = 64 << 10
STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
_EMPTY: frozenset[int] = frozenset({204, 304})


class DateHeader:
    """The value of the Date header, made once a second for all answers of this process."""

    def __init__(self) -> None:
        self._made = (0, b"")  # the second, and its text

    def now(self) -> bytes:
        now = int(time.time())
        if now != self._made[0]:
            self._made = (now, formatdate(now, usegmt=True).encode())
        return self._made[1]


_date = DateHeader()


class RequestHead:
    """A request's head, parsed and checked. Raises FramingError when it is not one that HTTP/1.1 allows."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_length: int | None = None
        self.chunked = False
        self.expects_continue = False
        self._complete = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(_with_one_length(data))
        except httptools.HttpParserUpgrade:
            # the only upgrade, to a WebSocket, is made by its route; any other offer is answered in HTTP/1.1
            pass
        except httptools.HttpParserError as error:
            raise FramingError(_BETTER.get(str(error), str(error))) from None
        if not self._complete:
            raise FramingError("the header ends in the middle of a line")
        self.method = parser.get_method().decode("ascii")
        self.version = parser.get_http_version()
        if self.version not in ("1.0", "1.1"):
            raise FramingError(f"HTTP/{self.version} is not spoken here; send HTTP/1.1")
        self.keep_alive = self.version == "1.1"
        self._check()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._complete = True

    def _check(self) -> None:
        hosts = 0
        codings: list[bytes] = []
        for name, value in self.headers:
            if name == b"content-length":
                if _LENGTH.fullmatch(value) is None:
                    raise FramingError(f"Content-Length must be a number, not {value[:40]!r}")
                if self.content_length not in (None, int(value)):
                    raise FramingError("several Content-Lengths that differ; send one of them")
                self.content_length = int(value)
            elif name == b"transfer-encoding":
                codings.append(value.lower())
            elif name == b"connection":
                if b"close" in [option.strip().lower() for option in value.split(b",")]:
                    self.keep_alive = False
            elif name == b"host":
                hosts += 1
            elif name == b"expect":
                self.expects_continue = value.lower() == b"100-continue" and self.version == "1.1"
        if hosts != 1 and self.version == "1.1":
            raise FramingError("HTTP/1.1 needs exactly one Host")
        if codings:
            if self.content_length is not None:
                raise FramingError(_BOTH)
            if self.version != "1.1":
                raise FramingError("Transfer-Encoding in HTTP/1.0, which has none; send Content-Length")
            if codings != [b"chunked"]:
                raise FramingError("Transfer-Encoding must be chunked and nothing else")
            self.chunked = True

    @property
    def target(self) -> tuple[str, bytes, bytes]:
        """Returns the decoded path, the path as it was sent, and the query."""
        url = self.url
        if not url.startswith(b"/"):
            url = _path_of(url)
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        return (unquote(path) if "%" in path else path), raw_path, query


def _with_one_length(data: bytes | bytearray) -> bytes | bytearray:
    """Drops repeated Content-Length headers with the same value: llhttp refuses them, though the length is
    not in doubt."""
    if data.lower().count(b"\ncontent-length:") < 2:
        return data
    lines = bytes(data).split(b"\r\n")
    kept: list[bytes] = []
    seen: set[bytes] = set()
    for line in lines:
        if line[:15].lower() == b"content-length:":
            normal = line[15:].strip(b" \t")
            if normal in seen:
                continue
            seen.add(normal)
        kept.append(line)
    return b"\r\n".join(kept)


def _path_of(url: bytes) -> bytes:
    """Returns the path of a request target that also names the host, as for a proxy, or the target itself if
    it has none."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError:
        return url
    query = b"?" + parsed.query if parsed.query else b""
    return (parsed.path or b"/") + query


class Carrier(Protocol):
    """What a call needs of its connection."""

    client: tuple[str, int] | None
    write_paused: bool
    write: Callable[[bytes], None]

    @property
    def stopping(self) -> bool:
        """Whether the server takes no further request."""

    async def until_writable(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def on_answered(self, call: HttpCall) -> None: ...

    def on_upgraded(self) -> None: ...

    def break_off(self) -> None: ...


class LengthBody:
    """A body with a Content-Length, or without a body: length 0."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = length == 0
        self.has_rest = False

    def take(self, buffer: bytearray) -> bytes:
        data = bytes(buffer[: self._left])
        del buffer[: len(data)]
        self._left -= len(data)
        self.complete = self._left == 0
        return data


class EndlessBody:
    """Everything that arrives after an upgrade, until the router wants no more of it."""

    def __init__(self) -> None:
        self.complete = self.has_rest = False

    def take(self, buffer: bytearray) -> bytes:
        data = bytes(buffer)
        buffer.clear()
        return data


class HttpCall:
    """One request and its answer, between the application and the connection."""

    def __init__(self, connection: Carrier, head: RequestHead, body: LengthBody | ChunkedBody) -> None:
        self._connection = connection
        self._head = head
        self._unread = bytearray()
        self._news: asyncio.Future[None] | None = None
        self._answer_head = (
            # held back until the first part of the body, so that both leave in one system call and one packet
            b""
        )
        self._chunked = False
        self._has_body = True
        self._expects_continue = head.expects_continue
        self._read_to_end = False
        self.body: LengthBody | ChunkedBody | EndlessBody = body
        self.keep_alive = head.keep_alive
        self.answering = False  # the application has sent the status
        self.complete = False  # the whole answer was written
        self.disconnected = False
        self.task: asyncio.Task[None] | None = None  # what runs it
        self._request_id = "-"  # kept for the time after the exchange is gone
        path, raw_path, query = head.target
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": connection.client,
            "server": None,
            "state": {"connection": connection},
        }

    @property
    def request_id(self) -> str:
        exchange: Any = self.scope.get("exchange")
        return str(exchange.request_id) if exchange is not None else self._request_id

    async def run(self, app: ASGIApp, turns: Turns) -> None:
        try:
            await turns.turn()
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            pass  # the server cancels it; the client sees the connection's end
        except Exception:
            logger.exception("%s: the application failed", self.request_id)
        finally:
            # The exchange and this call refer to each other. Without this, both would stay until the garbage
            # collector runs.
            self._request_id = self.request_id
            self.scope.pop("exchange", None)
            if not self.complete and not self.disconnected:
                self._connection.break_off()

    # --- the request

    def take(self, buffer: bytearray) -> bool:
        """Takes the body's bytes from the buffer, and drops them after the answer. Returns whether the body
        is complete."""
        data = self.body.take(buffer)
        if not self.complete and not self.disconnected:
            self._unread += data
            if len(self._unread) > UNREAD_BYTES:
                self._connection.pause_reading()
            self._wake()
        return self.body.complete

    def hang_up(self) -> None:
        self.disconnected = True
        self._wake()

    def end_upgraded(self) -> None:
        """On an upgraded connection, tells the application that nothing more is read, so that it says
        goodbye."""
        if isinstance(self.body, EndlessBody):
            self.body.complete = True
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def receive(self) -> Message:
        if self._expects_continue and not self.answering and not self.disconnected:
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.disconnected or self.complete or self._has_news()):
            self._connection.resume_reading()
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        body, self._unread = bytes(self._unread), bytearray()
        self._read_to_end = self.body.complete
        return {"type": "http.request", "body": body, "more_body": not self._read_to_end}

    def whole_body(self) -> bytes | None:
        """Returns the body if it is complete and unread, otherwise None. Reading it needs no wait and no
        timer."""
        if not self.body.complete or self._read_to_end or self.disconnected or self.complete:
            return None
        self._read_to_end = True
        body, self._unread = bytes(self._unread), bytearray()
        return body

    def _has_news(self) -> bool:
        return bool(self._unread) or (self.body.complete and not self._read_to_end)

    # --- the answer

    async def send(self, message: Message) -> None:
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            if self.answering:
                raise InternalError("an answer was begun twice")
            self._begin(message["status"], message["headers"])
            return
        if not self.answering or self.complete:
            raise InternalError("an answer's body came outside of it")
        if self._connection.write_paused:
            await self._connection.until_writable()
        self._write_body(message.get("body", b""), more=message.get("more_body", False))

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.answering = True
        has_length = upgrades = status == 101
        if upgrades:
            self.body = EndlessBody()
            self._read_to_end = self.keep_alive = False
            self._connection.on_upgraded()
        lines = [STATUS_LINES[status], b"date: ", _date.now(), b"\r\n"]
        for name, value in headers:
            if b"\n" in value or b"\r" in value:
                raise InternalError(f"the value of an answer's {name.decode()} has a line end in it")
            if name == b"content-length":
                has_length = True
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            lines += (name, b": ", value, b"\r\n")
        self._has_body = self._head.method != "HEAD" and status not in _EMPTY
        if self._has_body and not has_length:
            if self._head.version == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        if self._connection.stopping:
            self.keep_alive = False
        if not self.keep_alive and not upgrades:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._answer_head = b"".join(lines)

    def _write_body(self, data: bytes, *, more: bool) -> None:
        if self.disconnected:
            return
        head, self._answer_head = self._answer_head, b""
        if not self._has_body:
            data = b""
        elif self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = piece if more else piece + b"0\r\n\r\n"
        if head or data:
            self._connection.write(head + data if head else data)
        if not more:
            self.complete = True
            self._wake()
            self._connection.on_answered(self)

    def try_write_chunk(self, data: bytes) -> bool:
        """Writes a piece of a chunked body at once. Returns False when the head is not written yet or the
        client is behind."""
        if self._answer_head or self._connection.write_paused:
            return False
        if not self.disconnected and data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True
