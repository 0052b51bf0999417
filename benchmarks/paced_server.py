"""A server that only keeps time: the tokens of every answer come at moments that are known beforehand.

    python -m benchmarks.paced_server PORT

Most gaps are 12 ms, every tenth is 45 ms, and the first token comes after 160 ms. So what a load generator reports can be checked, and the time
that the generator itself takes is not hidden by a model's.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

FIRST_TOKEN_S, GAP_S, LONG_GAP_S, LONG_GAP_EVERY = 0.160, 0.012, 0.045, 10

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = (
    b'{"id":"cmpl-8f7c2b1e5d6a4c3b","object":"text_completion","created":1790000000,"model":"paced",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}'
)


class _PacedRequest(msgspec.Struct):
    max_tokens: int


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._answers: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for answer in self._answers:
            answer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        if not end or len(body) < length:
            return
        self._received = body[length:]
        if head.startswith(b"POST /v1/completions "):
            answer = asyncio.create_task(self._answer(msgspec.json.decode(body[:length], type=_PacedRequest)))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
        else:
            self._write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async def _answer(self, asked: _PacedRequest) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + FIRST_TOKEN_S
        self._write(_HEAD)
        for index in range(asked.max_tokens):
            await asyncio.sleep(due - loop.time())
            self._event(_TOKEN)
            due += LONG_GAP_S if index % LONG_GAP_EVERY == 0 else GAP_S
        usage = {"completion_tokens": asked.max_tokens}
        self._event(msgspec.json.encode({"choices": [], "usage": usage}))
        self._event(b"[DONE]")
        self._write(b"0\r\n\r\n")

    def _event(self, data: bytes) -> None:
        self._write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def _write(self, raw: bytes) -> None:
        if self._transport is not None:
            self._transport.write(raw)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
