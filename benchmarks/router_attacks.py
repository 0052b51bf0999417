"""The worst that one key, or a stranger without a key, can do to a router within its limits. Part of `benchmarks.router_worst`.

Each attack goes on for as long as it is given, and takes refusals as they come: it sends the same again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

GREEDY, OTHER = "sk-greedy", "sk-other"
BODY_BYTES = (16 << 20) - 1024
CONNECTIONS = 400  # the router's limit, within what a process may open
AGAIN_S = 1.0  # after which a connection that was closed comes again
SPECIAL = "<|im_start|>"

Attack = Callable[[str], Awaitable[None]]
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def head(method: str, path: str, size: int | None, key: str | None = GREEDY, more: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["content-type: application/json", f"content-length: {size}"] if size is not None else []
    return ("\r\n".join(lines) + "\r\n" + more + "\r\n").encode()


@asynccontextmanager
async def connected(url: str, limit: int = 1 << 16) -> AsyncIterator[Wire]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Reads an answer and returns its status."""
    start = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, found, length = start.partition(b"content-length:")
    if found:
        await reader.readexactly(int(length.split(b"\r\n")[0]))
    elif b"transfer-encoding: chunked" in start:
        while size := int((await reader.readline()).strip(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    return int(start.split()[1])


def again(count: int, once: Callable[[Wire], Awaitable[None]]) -> Attack:
    """`count` connections that do the same again and again, and come again when they are closed."""

    async def one(url: str) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with connected(url) as wire:
                    while True:
                        await once(wire)
            await asyncio.sleep(AGAIN_S)

    async def attack(url: str) -> None:
        await asyncio.gather(*(one(url) for _ in range(count)))

    return attack


def asking(
    method: str, path: Callable[[], str], body: dict[str, Any] | None, key: str | None = GREEDY
) -> Any:
    data = json.dumps(body).encode() if body is not None else b""

    async def once(wire: Wire) -> None:
        reader, writer = wire
        writer.write(head(method, path(), len(data) if body is not None else None, key) + data)
        await writer.drain()
        await read_answer(reader)

    return once


async def slow_body(wire: Wire) -> None:
    """Sends all but the end of a body, and is then silent until it is cut off."""
    reader, writer = wire
    writer.write(head("POST", "/v1/completions", BODY_BYTES) + b'{"prompt":"' + b"a" * (BODY_BYTES - 100))
    await reader.readuntil(b"\r\n\r\n")
    raise ConnectionResetError


async def stay(wire: Wire) -> None:
    """Asks once without a key, and keeps the connection."""
    reader, writer = wire
    writer.write(head("GET", "/health", None, None))
    await read_answer(reader)
    await reader.read(1)
    raise ConnectionResetError


def session(text: int) -> Callable[[Wire], Awaitable[None]]:
    """A realtime session with so much text, kept open by pings."""

    def frame(kind: int, data: bytes) -> bytes:
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + struct.pack("!Q", len(data))
        return bytes([0x80 | kind]) + size + bytes(4) + data

    async def once(wire: Wire) -> None:
        reader, writer = wire
        key = base64.b64encode(os.urandom(16)).decode()
        more = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n"
        writer.write(head("GET", "/v1/realtime", None, more=more))
        if b" 101 " not in await reader.readuntil(b"\r\n\r\n"):
            raise ConnectionResetError
        event = {"type": "session.update", "session": {"instructions": "a" * text}}
        writer.write(frame(1, json.dumps(event).encode()))
        while not reader.at_eof():
            writer.write(frame(9, b""))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 20), 1.0)
        raise ConnectionResetError

    return once


async def never_read(wire: Wire) -> None:
    reader, writer = wire
    data = json.dumps({"model": "instant", "prompt": "x", "max_tokens": 100_000, "stream": True}).encode()
    writer.write(head("POST", "/v1/completions", len(data)) + data)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(3600)


def _made_up() -> str:
    return f"/v1/responses/resp_{secrets.token_hex(24)}"


def _chat(text: str) -> dict[str, Any]:
    return {"model": "instant", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


ATTACKS: dict[str, Callable[[], Attack]] = {
    "slow bodies": lambda: again(40, slow_body),
    "realtime sessions of 16 MB": lambda: again(40, session(16_000_000)),
    "realtime sessions on all connections": lambda: again(CONNECTIONS, session(10)),
    "connections held by a stranger": lambda: again(CONNECTIONS, stay),
    "a stranger's /metrics": lambda: again(8, asking("GET", lambda: "/metrics", None, None)),
    "a stranger's /health": lambda: again(8, asking("GET", lambda: "/health", None, None)),
    "/tokenize of the largest prompts": lambda: again(
        4,
        asking(
            "POST", lambda: "/tokenize", {"prompt": "ab" * (BODY_BYTES // 2 - 50), "return_token_strs": True}
        ),
    ),
    "special tokens": lambda: again(
        4, asking("POST", lambda: "/v1/chat/completions", _chat(SPECIAL * (BODY_BYTES // len(SPECIAL) - 50)))
    ),
    "stored responses": lambda: again(
        16,
        asking("POST", lambda: "/v1/responses", {"model": "instant", "input": "x", "max_output_tokens": 16}),
    ),
    "recalls": lambda: again(100, asking("GET", _made_up, None)),
    "background answers": lambda: again(
        4,
        asking(
            "POST",
            lambda: "/v1/responses",
            {"model": "instant", "input": "x", "max_output_tokens": 2_000, "background": True},
        ),
    ),
    "streams that are never read": lambda: again(100, never_read),
}


async def attack_for(url: str, name: str, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ATTACKS[name]()(url), seconds)
