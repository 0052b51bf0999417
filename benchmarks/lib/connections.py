"""Plain HTTP over sockets: a client library would be measured as well, and would not do what clients that misbehave do."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import msgspec

_PIECE = 1 << 20


class TimedAnswer(msgspec.Struct, frozen=True):
    """Times in seconds since the request was sent."""

    status: int
    first_s: float
    total_s: float
    events: int
    body: bytes = b""  # if it was kept


class HttpConnection:
    """One connection, which carries one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._sent_at = 0.0

    @classmethod
    async def to(cls, url: str, *, receive_buffer: int | None = None) -> HttpConnection:
        parts, connection = urlsplit(url), socket.socket()
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(connection, (parts.hostname, parts.port))
        return cls(*await asyncio.open_connection(sock=connection, limit=receive_buffer or 1 << 16))

    async def send(
        self,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        *,
        method: str = "POST",
        key: str | None = None,
        headers: str = "",
    ) -> None:
        """`headers` are further lines, each with its line break."""
        self._sent_at = time.perf_counter()
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        self.writer.write(head_of(path, method, None if body is None else len(data), key, headers) + data)
        await self.writer.drain()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the answer's status line and headers in lower case, and then its body: each chunk as it comes, or a body of known
        length in pieces."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        yield head
        if b"transfer-encoding: chunked" in head:
            while size := int((await self.reader.readline()).strip(), 16):
                yield await self.reader.readexactly(size + 2)
            await self.reader.readline()
            return
        left = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        while left:
            piece = await self.reader.readexactly(min(left, _PIECE))
            left -= len(piece)
            yield piece

    async def answer(self, *, keep: bool = False) -> TimedAnswer:
        """Reads the answer to what has just been sent, and `keep`s its body if asked to."""
        began, first, events, status, body = self._sent_at, 0.0, 0, 0, b""
        async for piece in self.pieces():
            if not status:
                status = int(piece.split()[1])
                continue
            first = first or time.perf_counter() - began
            events += piece.count(b"data: ")
            body += piece if keep else b""
        return TimedAnswer(status, first, time.perf_counter() - began, events, body)

    def stop_reading(self) -> None:
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def abort(self) -> None:
        self.writer.transport.abort()


def head_of(path: str, method: str, size: int | None, key: str | None = None, headers: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["content-type: application/json", f"content-length: {size}"] if size is not None else []
    return ("\r\n".join(lines) + "\r\n" + headers + "\r\n").encode()


@asynccontextmanager
async def connected(url: str, *, receive_buffer: int | None = None) -> AsyncIterator[HttpConnection]:
    connection = await HttpConnection.to(url, receive_buffer=receive_buffer)
    try:
        yield connection
    finally:
        connection.abort()


async def serve(
    pipe: Connection, protocol: Callable[[], asyncio.Protocol], *told: object, asked: Callable[[], object] | None = None
) -> None:
    """Serves until the pipe is closed. Sends the port there, with what else is `told`, and then answers what is `asked`."""
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pipe.send((port, *told) if told else port)
    while True:
        try:
            await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        pipe.send(asked() if asked is not None else None)
