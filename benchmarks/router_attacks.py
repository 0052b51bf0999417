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


async def read_body(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads an answer of known length."""
    start = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(start.partition(b"content-length:")[2].split(b"\r\n")[0])
    found: dict[str, Any] = json.loads(await reader.readexactly(length))
    return found


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


async def begin_session(wire: Wire) -> None:
    """Opens a realtime session."""
    reader, writer = wire
    key = base64.b64encode(os.urandom(16)).decode()
    more = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n"
    writer.write(head("GET", "/v1/realtime", None, more=more))
    if b" 101 " not in await reader.readuntil(b"\r\n\r\n"):
        raise ConnectionResetError


def session(text: int) -> Callable[[Wire], Awaitable[None]]:
    """A realtime session with so much text, kept open by pings."""

    def frame(kind: int, data: bytes) -> bytes:
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + struct.pack("!Q", len(data))
        return bytes([0x80 | kind]) + size + bytes(4) + data

    async def once(wire: Wire) -> None:
        reader, writer = wire
        await begin_session(wire)
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


def pings(size: int) -> Callable[[Wire], Awaitable[None]]:
    """A realtime session that pings as fast as it can."""
    many = (b"\x89\x80" + bytes(4)) * (size // 6)

    async def once(wire: Wire) -> None:
        reader, writer = wire
        await begin_session(wire)
        while not reader.at_eof():
            writer.write(many)
            await writer.drain()
            await reader.read(1 << 20)
        raise ConnectionResetError

    return once


async def slow_head(wire: Wire) -> None:
    """Sends a header byte by byte, without a key."""
    _, writer = wire
    for byte in b"GET /health HTTP/1.1\r\nx: " + b"a" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.1)


async def pipelined(wire: Wire) -> None:
    """Sends many requests at once, and reads what comes."""
    reader, writer = wire
    writer.write(head("GET", "/health", None, None) * 200)
    while await reader.read(1 << 16):
        pass
    raise ConnectionResetError


def never_read_answer(path: str, body: dict[str, Any]) -> Callable[[Wire], Awaitable[None]]:
    data = json.dumps(body).encode()

    async def once(wire: Wire) -> None:
        reader, writer = wire
        writer.write(head("POST", path, len(data)) + data)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(3600)

    return once


def raw(path: str, data: Callable[[], bytes]) -> Attack:
    """Four connections with bodies of the largest size, which are refused after they have been parsed."""

    async def once(wire: Wire) -> None:
        reader, writer = wire
        writer.write(head("POST", path, len(made)) + made)
        await writer.drain()
        await read_answer(reader)

    made = data()
    return again(4, once)


def chain() -> Attack:
    """Responses that each continue the one before."""

    async def once(wire: Wire) -> None:
        reader, writer = wire
        before: str | None = None
        while True:
            body = {
                "model": "instant",
                "input": "x" * 50_000,
                "max_output_tokens": 1,
                "previous_response_id": before,
            }
            data = json.dumps(body).encode()
            writer.write(head("POST", "/v1/responses", len(data)) + data)
            await writer.drain()
            found = await read_body(reader)
            before = found.get("id")

    return again(4, once)


def new_grammars() -> Attack:
    """Requests with large schemas, no two alike."""

    async def once(wire: Wire) -> None:
        reader, writer = wire
        name = secrets.token_hex(4)
        schema = {
            "type": "object",
            "properties": {f"{name}{at}": {"enum": [name, "b", "c"]} for at in range(1000)},
        }
        body = _chat("x") | {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        }
        data = json.dumps(body).encode()
        writer.write(head("POST", "/v1/chat/completions", len(data)) + data)
        await writer.drain()
        await read_answer(reader)

    return again(16, once)


def _made_up() -> str:
    return f"/v1/responses/resp_{secrets.token_hex(24)}"


def _chat(text: str) -> dict[str, Any]:
    return {"model": "instant", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": "instant", "prompt": "x", "max_tokens": 100_000, **fields}


def generating(**fields: Any) -> Any:
    return asking("POST", lambda: "/v1/completions", _completion(**fields))


def _names() -> bytes:
    names = ",".join(f'"{number:06x}":1' for number in range(BODY_BYTES // 11))
    return f'{{"model":"instant","prompt":"x","logit_bias":{{{names}}}}}'.encode()


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"f{number}",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
    for number in range(128)
]

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
    "chains of responses": chain,
    "wide requests on all places": lambda: again(4, generating(n=128, stream=True)),
    "wide requests, whole, with log-probabilities": lambda: again(
        2, generating(n=128, max_tokens=1500, logprobs=20)
    ),
    "many prompts": lambda: again(4, generating(prompt=["x" * 2000] * 128, max_tokens=1)),
    "many short streams": lambda: again(100, generating(max_tokens=2, stream=True)),
    "stop strings": lambda: again(
        16, generating(max_tokens=500, n=16, stream=True, stop=["z" * 1000 + str(at) for at in range(4)])
    ),
    "logit_bias": lambda: again(16, generating(max_tokens=1, logit_bias={str(at): 1 for at in range(256)})),
    "tools": lambda: again(16, asking("POST", lambda: "/v1/chat/completions", _chat("x") | {"tools": TOOLS})),
    "new grammars": new_grammars,
    "bodies of one text": lambda: raw(
        "/v1/completions", lambda: b'{"prompt":"' + b"a " * (BODY_BYTES // 2) + b'"}'
    ),
    "bodies of escapes": lambda: raw(
        "/v1/completions", lambda: b'{"prompt":"' + rb"\u00e4" * (BODY_BYTES // 6) + b'"}'
    ),
    "bodies of numbers": lambda: raw(
        "/v1/completions", lambda: b'{"prompt":[' + b"1," * (BODY_BYTES // 2) + b"1]}"
    ),
    "bodies of names": lambda: raw("/v1/completions", _names),
    "realtime sessions that ping": lambda: again(40, pings(60_000)),
    "/tokenize of the longest prompts": lambda: again(
        4, asking("POST", lambda: "/tokenize", {"prompt": "ab" * 500_000, "return_token_strs": True})
    ),
    "/tokenize that is never read": lambda: again(
        40, never_read_answer("/tokenize", {"prompt": "ab" * 500_000, "return_token_strs": True})
    ),
    "/detokenize of the longest": lambda: again(
        4, asking("POST", lambda: "/detokenize", {"tokens": [70] * 1_000_000})
    ),
    "a stranger's slow headers": lambda: again(CONNECTIONS, slow_head),
    "a stranger's pipelines": lambda: again(40, pipelined),
    "a stranger's wrong keys": lambda: again(
        40, asking("POST", lambda: "/v1/completions", _completion(), "sk-no")
    ),
    "streams that are never read": lambda: again(100, never_read),
}


async def attack_for(url: str, name: str, seconds: float) -> None:
    """Returns while the attack may still be ending: its process must end at once."""
    await asyncio.wait({asyncio.ensure_future(ATTACKS[name]()(url))}, timeout=seconds)
