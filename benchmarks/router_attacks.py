"""The worst that one key, or a stranger without a key, can do to a router within its limits, and bodies that are expensive to parse. Part of
`benchmarks.router_worst`.

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
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.lib.connections import HttpConnection, connected
from benchmarks.router_bed import MODEL
from tandem.wire.endpoints import parse_endpoint

GREEDY, OTHER = "sk-greedy", "sk-other"
BODY_BYTES = (16 << 20) - 1024
CONNECTIONS = 500  # the router's limit, within what a process may open
AGAIN_S = 1.0  # after which a connection that was closed comes again
STRANGERS = 1_000  # a second, at internal ports
SPECIAL = "<|im_start|>"

Attack = Callable[[str], Awaitable[None]]
Once = Callable[[HttpConnection], Awaitable[None]]


def _names() -> bytes:
    return b'x","logit_bias":{' + b",".join(b'"%06x":1' % number for number in range(BODY_BYTES // 11)) + b"}}"


# Prompts of bodies of the largest size that is allowed. They are refused after they have been parsed.
LARGE_PROMPTS: dict[str, Callable[[], bytes]] = {
    "one text": lambda: b'"' + b"a " * (BODY_BYTES // 2) + b'"}',
    "escapes": lambda: b'"' + rb"\u00e4" * (BODY_BYTES // 6) + b'"}',
    "numbers": lambda: b"[" + b"1," * (BODY_BYTES // 2) + b"1]}",
    "names": lambda: b'"' + _names(),
}


def again(count: int, once: Once, receive_buffer: int | None = None) -> Attack:
    """`count` connections that do the same again and again, and come again when they are closed."""

    async def one(url: str) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with connected(url, receive_buffer=receive_buffer) as connection:
                    while True:
                        await once(connection)
            await asyncio.sleep(AGAIN_S)

    async def attack(url: str) -> None:
        await asyncio.gather(*(one(url) for _ in range(count)))

    return attack


def asking(path: str, body: dict[str, Any] | bytes | None = None, key: str | None = GREEDY) -> Once:
    """Asks and reads the answer: with POST if there is a body. "{id}" in the path becomes an id that is made up."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body

    async def once(connection: HttpConnection) -> None:
        method = "GET" if data is None else "POST"
        await connection.send(path.replace("{id}", secrets.token_hex(24)), data, method=method, key=key)
        await connection.answer()

    return once


def never_reading(path: str, body: dict[str, Any]) -> Once:
    data = json.dumps(body).encode()

    async def once(connection: HttpConnection) -> None:
        await connection.send(path, data, key=GREEDY)
        connection.stop_reading()
        await asyncio.sleep(3600)

    return once


async def slow_body(connection: HttpConnection) -> None:
    """Sends all but the end of a body, and is then silent until it is cut off."""
    lines = f"content-length: {BODY_BYTES}\r\ncontent-type: application/json\r\n"
    await connection.send("/v1/completions", key=GREEDY, headers=lines)
    connection.writer.write(b'{"prompt":"' + b"a" * (BODY_BYTES - 100))
    await connection.reader.readuntil(b"\r\n\r\n")
    raise ConnectionResetError


async def stay(connection: HttpConnection) -> None:
    """Asks once without a key, and keeps the connection."""
    await connection.send("/health", method="GET")
    await connection.answer()
    await connection.reader.read(1)
    raise ConnectionResetError


def hanging_up(count: int) -> Attack:
    """So many clients that ask for a stream, go away soon after, and come again at once."""

    async def one(url: str, index: int) -> None:
        while True:
            async with connected(url) as connection:
                await connection.send("/v1/completions", _completion(stream=True), key=GREEDY)
                await asyncio.sleep(0.1 + 0.01 * (index % 10))

    async def attack(url: str) -> None:
        await asyncio.gather(*(one(url, index) for index in range(count)))

    return attack


async def begin_session(connection: HttpConnection) -> None:
    """Opens a realtime session."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n"
    await connection.send("/v1/realtime", method="GET", key=GREEDY, headers=lines)
    if b" 101 " not in await connection.reader.readuntil(b"\r\n\r\n"):
        raise ConnectionResetError


def session(text: int) -> Once:
    """A realtime session with so much text, kept open by pings."""

    def frame(kind: int, data: bytes) -> bytes:
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + struct.pack("!Q", len(data))
        return bytes([0x80 | kind]) + size + bytes(4) + data

    async def once(connection: HttpConnection) -> None:
        await begin_session(connection)
        event = {"type": "session.update", "session": {"instructions": "a" * text}}
        connection.writer.write(frame(1, json.dumps(event).encode()))
        while not connection.reader.at_eof():
            connection.writer.write(frame(9, b""))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.reader.read(1 << 20), 1.0)
        raise ConnectionResetError

    return once


def pings(size: int) -> Once:
    """A realtime session that pings as fast as it can."""
    many = (b"\x89\x80" + bytes(4)) * (size // 6)

    async def once(connection: HttpConnection) -> None:
        await begin_session(connection)
        while not connection.reader.at_eof():
            connection.writer.write(many)
            await connection.writer.drain()
            await connection.reader.read(1 << 20)
        raise ConnectionResetError

    return once


async def slow_head(connection: HttpConnection) -> None:
    """Sends a header byte by byte, without a key."""
    for byte in b"GET /health HTTP/1.1\r\nx: " + b"a" * 1000:
        connection.writer.write(bytes([byte]))
        await connection.writer.drain()
        await asyncio.sleep(0.1)


async def pipelined(connection: HttpConnection) -> None:
    """Sends many requests at once, and reads what comes."""
    for _ in range(200):
        await connection.send("/health", method="GET")
    while await connection.reader.read(1 << 16):
        pass
    raise ConnectionResetError


async def chain(connection: HttpConnection) -> None:
    """Responses that each continue the one before."""
    before: str | None = None
    while True:
        body = _response(input="x" * 50_000, max_output_tokens=1, previous_response_id=before)
        await connection.send("/v1/responses", body, key=GREEDY)
        before = json.loads((await connection.answer(keep=True)).body).get("id")


async def batch(connection: HttpConnection) -> None:
    """Has many lines answered that each ask for much, of long prompts."""
    line = {"method": "POST", "url": "/v1/completions", "body": _completion(prompt="ab" * 50_000, n=16)}
    lines = b"".join(json.dumps({"custom_id": str(at), **line}).encode() + b"\n" for at in range(200))
    parts = [(b'"purpose"', b"batch"), (b'"file"; filename="in.jsonl"', lines)]
    form = [b"--cut\r\ncontent-disposition: form-data; name=%b\r\n\r\n%b\r\n" % part for part in parts]
    lines_of_head = "content-type: multipart/form-data; boundary=cut\r\n"
    body = b"".join(form) + b"--cut--\r\n"
    await connection.send("/v1/files", key=GREEDY, headers=f"{lines_of_head}content-length: {len(body)}\r\n")
    connection.writer.write(body)
    file = json.loads((await connection.answer(keep=True)).body).get("id")
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    await connection.send("/v1/batches", asked, key=GREEDY)
    await connection.answer()


async def new_grammar(connection: HttpConnection) -> None:
    """Sends a large schema, unlike any other."""
    name = secrets.token_hex(4)
    properties = {f"{name}{at}": {"enum": [name, "b", "c"]} for at in range(1000)}
    schema = {"name": "s", "schema": {"type": "object", "properties": properties}}
    body = _chat("x") | {"response_format": {"type": "json_schema", "json_schema": schema}}
    await connection.send("/v1/chat/completions", body, key=GREEDY)
    await connection.answer()


def strangers(doors: Sequence[str]) -> Attack:
    """A thousand strangers a second, who connect to internal ports and begin CURVE's handshake there as a member would, but have no key."""
    addresses = [(door.host, door.port) for door in map(parse_endpoint, doors) if door is not None]
    # ZMTP 3.1's greeting for CURVE, and a HELLO whose box was not made with any key.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = b"\x04\xc8" + b"\x05HELLO\x01\x00" + bytes(72) + os.urandom(32) + bytes(8) + os.urandom(80)

    async def come(address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*address)
            writer.write(greeting + hello)
            await asyncio.sleep(0.2)
            writer.transport.abort()

    async def attack(url: str) -> None:
        loop, came = asyncio.get_running_loop(), 0
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            while True:
                while came < (loop.time() - began) * STRANGERS:
                    group.create_task(come(addresses[came % len(addresses)]))
                    came += 1
                await asyncio.sleep(0.005)

    return attack


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", "max_tokens": 100_000, **fields}


def _response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "x", **fields}


def _tokenize(characters: int) -> dict[str, Any]:
    return {"prompt": "ab" * (characters // 2), "return_token_strs": True}


def chatting(body: dict[str, Any]) -> Once:
    return asking("/v1/chat/completions", body)


def generating(**fields: Any) -> Once:
    return asking("/v1/completions", _completion(**fields))


def large_body(prompt: Callable[[], bytes]) -> Callable[[Sequence[str]], Attack]:
    start = b'{"model":"instant","max_tokens":0,"prompt":'
    return lambda _: again(4, asking("/v1/completions", start + prompt()))


TOOLS = [
    {
        "type": "function",
        "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
    for number in range(128)
]

# By name; each is given the addresses of the decode node's and the router's internal ports.
ATTACKS: dict[str, Callable[[Sequence[str]], Attack]] = {
    "slow bodies": lambda _: again(40, slow_body),
    "realtime sessions of 16 MB": lambda _: again(40, session(16_000_000)),
    "realtime sessions on all connections": lambda _: again(CONNECTIONS, session(10)),
    "connections held by a stranger": lambda _: again(CONNECTIONS, stay),
    "a stranger's /metrics": lambda _: again(8, asking("/metrics", key=None)),
    "a stranger's /health": lambda _: again(8, asking("/health", key=None)),
    "/tokenize of the largest prompts": lambda _: again(4, asking("/tokenize", _tokenize(BODY_BYTES - 100))),
    "special tokens": lambda _: again(4, chatting(_chat(SPECIAL * (BODY_BYTES // len(SPECIAL) - 50)))),
    "stored responses": lambda _: again(16, asking("/v1/responses", _response(max_output_tokens=16))),
    "recalls": lambda _: again(100, asking("/v1/responses/resp_{id}")),
    "background answers": lambda _: again(
        4, asking("/v1/responses", _response(max_output_tokens=2_000, background=True))
    ),
    "chains of responses": lambda _: again(4, chain),
    "wide requests on all places": lambda _: again(4, generating(n=128, stream=True)),
    "wide requests, whole, with log-probabilities": lambda _: again(2, generating(n=128, max_tokens=1500, logprobs=20)),
    "many prompts": lambda _: again(4, generating(prompt=["x" * 2000] * 128, max_tokens=1)),
    "many short streams": lambda _: again(100, generating(max_tokens=2, stream=True)),
    "stop strings": lambda _: again(
        16, generating(max_tokens=500, n=16, stream=True, stop=["z" * 1000 + str(at) for at in range(4)])
    ),
    "logit_bias": lambda _: again(16, generating(max_tokens=1, logit_bias={str(at): 1 for at in range(256)})),
    "batches of long lines": lambda _: again(4, batch),
    "tools": lambda _: again(16, chatting(_chat("x", tools=TOOLS))),
    "new grammars": lambda _: again(16, new_grammar),
    **{f"bodies of {kind}": large_body(prompt) for kind, prompt in LARGE_PROMPTS.items()},
    "realtime sessions that ping": lambda _: again(40, pings(60_000)),
    "/tokenize of the longest prompts": lambda _: again(4, asking("/tokenize", _tokenize(1_000_000))),
    "/tokenize that is never read": lambda _: again(40, never_reading("/tokenize", _tokenize(1_000_000))),
    "/detokenize of the longest": lambda _: again(4, asking("/detokenize", {"tokens": [70] * 1_000_000})),
    "a stranger's slow headers": lambda _: again(CONNECTIONS, slow_head),
    "a stranger's pipelines": lambda _: again(40, pipelined),
    "a stranger's wrong keys": lambda _: again(40, asking("/v1/completions", _completion(), "sk-no")),
    "streams that are never read": lambda _: again(
        100, never_reading("/v1/completions", _completion(stream=True)), receive_buffer=4096
    ),
    "clients that hang up": lambda _: hanging_up(8),
    "strangers at internal ports": strangers,
}


async def attack_for(url: str, doors: Sequence[str], name: str, seconds: float) -> None:
    """Returns while the attack may still be ending: its process must end at once."""
    await asyncio.wait({asyncio.ensure_future(ATTACKS[name](doors)(url))}, timeout=seconds)
