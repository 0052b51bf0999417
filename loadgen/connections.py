"""HTTP/1.1 over kept connections. Each response is passed on as its bytes arrive."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol
from urllib.parse import urlsplit

from tandem.base.errors import ConfigurationError
from tandem.loadgen.http1 import MalformedResponse, ResponseParser
from tandem.loadgen.timeline import RequestFailure

CONNECT_TIMEOUT_S = 10.0
NO_HEADERS: Mapping[str, str] = {}


class Sink(Protocol):
    """Reads a response. Called from the event loop as bytes arrive; must not raise."""

    def begin(self, status: int) -> None: ...

    def body(self, now: float, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    tls: ssl.SSLContext | None
    base_path: str  # without a slash at its end

    @classmethod
    def of_url(cls, url: str) -> Address:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as the resolver does
        except ValueError as error:
            raise ConfigurationError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not host or not parts.path.isascii():
            raise ConfigurationError(f"{url!r} must be an http or https URL such as http://localhost:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class HttpClient:
    """Opens as many connections as there are exchanges at once, and reuses idle ones, the last used first."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[_Connection] = []

    @property
    def authority(self) -> str:
        return self._address.authority

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop().close()

    async def exchange(
        self, method: str, path: str, body: bytes, sink: Sink, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        """Returns when the response has ended in HTTP's terms. Raises RequestFailure. Its only deadline is the one for
        connecting."""
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = (
            f"{method} {self._address.base_path}{path} HTTP/1.1\r\n"
            f"Host: {self._address.authority}\r\n"
            f"User-Agent: tandem-bench\r\n"
            f"Accept-Encoding: identity\r\n"
            f"Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"{self._headers}{own}\r\n"
        ).encode("latin-1") + body
        while True:
            connection, used_before = await self._connect()
            try:
                await connection.exchange(request, sink)
            except _ClosedUnanswered:
                # On a reused connection the server was probably closing it as we wrote, so the request is sent again. On a new
                # connection this is a failure.
                if used_before:
                    continue
                raise RequestFailure("disconnected", "the server closed the connection without an answer") from None
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def _connect(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self._address.host, self._address.port, ssl=self._address.tls
                )
        except TimeoutError as error:
            raise RequestFailure("connect", f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:  # refused, unreachable, unknown name, bad certificate
            raise RequestFailure("connect", f"{self._address.authority}: {error.strerror or error}") from error
        return connection, False


class _ClosedUnanswered(Exception):
    """The connection ended before the first byte of the response."""


class _Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._sink: Sink | None = None
        self._ended: asyncio.Future[None] | None = None
        self._open = False
        self._begun = False
        self._answered = False

    @property
    def reusable(self) -> bool:
        return self._open and self._ended is None and self._parser.reusable

    def close(self) -> None:
        self._open = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, sink: Sink) -> None:
        if self._transport is None or not self._open:
            raise _ClosedUnanswered
        self._parser = ResponseParser()
        self._sink = sink
        self._begun = self._answered = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            if not self._ended.done() or self._ended.cancelled():
                # The rest of this response may still arrive, so the connection must not be reused
                self._open = False
            self._ended = self._sink = None

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._sink is None or self._ended is None:
            self.close()  # nothing was asked
            return
        self._answered = True
        try:
            body = self._parser.feed(data)
        except MalformedResponse as error:
            self._end(RequestFailure("malformed", str(error)))
            self.close()
            return
        if not self._begun and self._parser.status:
            self._begun = True
            self._sink.begin(self._parser.status)
        if body:
            self._sink.body(now, body)
        if self._parser.complete:
            self._end(None)

    def eof_received(self) -> bool:
        self._open = False
        if self._parser.end_of_stream():
            self._end(None)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        reason = str(error) if error is not None else "the server closed it"
        if self._answered:
            self._end(RequestFailure("disconnected", f"the connection ended within the answer: {reason}"))
        else:
            self._end(_ClosedUnanswered())

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
