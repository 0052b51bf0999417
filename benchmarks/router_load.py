"""Clients for the router's benchmark: plain sockets, so that a client library is not measured."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from urllib.parse import urlsplit

import msgspec


class RouterAnswer(msgspec.Struct):
    """Times in seconds since the request was sent."""

    first_s: float
    total_s: float
    events: int


class RouterClient:
    """One connection, which carries one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self._reader, self._writer

    async def ask(self, path: str, body: dict[str, object]) -> RouterAnswer:
        reader, writer = await self._connect()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        began = time.perf_counter()
        writer.write(head.encode() + data)
        header = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in header.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"the router answered {header!r}")
        if b"content-length: " in header:
            length = int(header.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            took = time.perf_counter() - began
            return RouterAnswer(took, took, 1)
        first, events = 0.0, 0
        while True:
            size = int((await reader.readline()).strip(), 16)
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                return RouterAnswer(first, time.perf_counter() - began, events)
            first = first or time.perf_counter() - began
            events += chunk.count(b"data: ")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def streams(url: str, count: int, tokens: int, prompt: str) -> list[RouterAnswer]:
    """Runs `count` streams at once. They begin a little apart, because users do not act in step."""
    clients = [RouterClient(url) for _ in range(count)]

    async def one(index: int) -> RouterAnswer:
        await asyncio.sleep(index * 0.002)
        body: dict[str, object] = {"model": "instant", "prompt": prompt, "max_tokens": tokens, "stream": True}
        return await clients[index].ask("/v1/completions", body)

    try:
        return await asyncio.gather(*(one(index) for index in range(count)))
    finally:
        for client in clients:
            client.close()


async def requests(
    url: str,
    connections: int,
    each: int,
    prompt: str,
    tokens: int,
    *,
    new_prompts: bool = False,
    chats: bool = False,
) -> float:
    """Returns how many whole answers per second come over this many connections. With `new_prompts` no two prompts are alike. With `chats`
    each is a user's message."""

    async def one() -> None:
        client = RouterClient(url)
        for _ in range(each):
            asked = f"{secrets.token_hex(8)} {prompt}" if new_prompts else prompt
            body: dict[str, object] = {"model": "instant", "max_tokens": tokens}
            if chats:
                body["messages"] = [{"role": "user", "content": asked}]
            else:
                body["prompt"] = asked
            await client.ask("/v1/chat/completions" if chats else "/v1/completions", body)
        client.close()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    return connections * each / (time.perf_counter() - began)
