"""A server whose bytes the test decides. It knows only the part of HTTP that the load generator uses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any


class Exchange:
    """One request, with methods to answer it."""

    def __init__(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        self.headers = headers
        self.method = method
        self.path = path
        self.body = body
        self._writer = writer

    async def write(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def respond(self, status: int, body: object, headers: str = "") -> None:
        payload = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Reason\r\n{headers}Content-Length: {len(payload)}\r\n\r\n"
        await self.write(head.encode() + payload)

    async def begin(self) -> None:
        await self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        payload = f"data: {text}\n\n".encode()
        await self.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    async def token(self, text: str = " word") -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})

    async def usage(self, prompt: int, completion: int) -> None:
        await self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})

    async def end(self) -> None:
        await self.event("[DONE]")
        await self.write(b"0\r\n\r\n")

    async def hang_up(self) -> None:
        self._writer.close()


async def complete(exchange: Exchange, text: str = " word") -> None:
    """Sends a whole, correct answer at once."""
    tokens = exchange.body["max_tokens"]
    prompt = exchange.body["prompt"]
    await exchange.begin()
    for _ in range(tokens):
        await exchange.token(text)
    await exchange.usage(len(prompt.split()) if isinstance(prompt, str) else len(prompt), tokens)
    await exchange.end()


class FakeServer:
    def __init__(self, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        self._answer = answer
        self.requests: list[Exchange] = []
        self.connections = 0
        self.tasks: list[asyncio.Task[Any]] = []  # one for each connection
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.current_task())
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split("\r\n", 1)[0].split(" ")
                lines = (line.partition(":") for line in head.split("\r\n")[1:] if line)
                headers = {name.lower(): value.strip() for name, _, value in lines}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                exchange = Exchange(method, path, headers, json.loads(content) if content else {}, writer)
                self.requests.append(exchange)
                await self._answer(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Callable[[Exchange], Awaitable[None]]) -> AsyncIterator[FakeServer]:
    server = FakeServer(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)


def answering(*steps: tuple[Any, ...]) -> Callable[[Exchange], Awaitable[None]]:
    """Each step is the name of an exchange's method, and what it gets."""

    async def answer(exchange: Exchange) -> None:
        for name, *given in steps:
            await getattr(exchange, name)(*given)

    return answer
