"""Sends answers: JSON whole, or in pieces if it is long, and server-sent events to clients of any speed.
`Delivery` sends every answer that streams while it is generated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Send

from tandem.router.dispatch import Generation, RequestLife
from tandem.router.http.exchange import HttpExchange
from tandem.router.openai.answer import Choice, Delta, LoopTurn
from tandem.router.tracing.traces import RequestTrace

# A larger answer is sent while it is made, chunked and without a length, as fast as the client reads.
WHOLE_BYTES = 256 << 10
_WRITE_BYTES = 64 << 10


async def send_json(
    send: Send, body: Any, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await send_bytes(send, msgspec.json.encode(body), b"application/json", status=status, headers=headers)


async def send_bytes(
    send: Send,
    body: bytes,
    content_type: bytes,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_pieces(
    send: Send, pieces: Iterator[bytes], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Sends an answer made of pieces, and lets the event loop go on in between. `send` waits for a client
    that is behind."""
    turn = LoopTurn()
    ready: list[bytes] = []
    size, begun = 0, False
    for piece in pieces:
        ready.append(piece)
        size += len(piece)
        if size > (_WRITE_BYTES if begun else WHOLE_BYTES):
            if not begun:
                begun = True
                start = [(b"content-type", b"application/json"), *headers]
                await send({"type": "http.response.start", "status": 200, "headers": start})
            await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
            ready.clear()
            size = 0
        await turn.pass_on()
    if begun:
        await send({"type": "http.response.body", "body": b"".join(ready), "more_body": False})
    else:
        await send_bytes(send, b"".join(ready), b"application/json", headers=headers)


# How many bytes are written at once while an answer has more tokens than were read.
WRITE_BYTES = 64 << 10


class EventStream:
    """A stream of server-sent events to one client. The server cuts off a client that does not read, which
    ends every wait here."""

    def __init__(self, exchange: HttpExchange, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._exchange = exchange
        self._connection = exchange.connection
        # an HTTP/1.1 answer without a length is chunked
        self._chunked = exchange.scope["http_version"] == "1.1"
        self._headers = headers

    @property
    def begun(self) -> bool:
        """Whether the status was sent. After it, a failure can no longer be a status code."""
        return self._exchange.status is not None

    def try_write(self, events: bytes) -> bool:
        """Writes at once and returns True, or returns False when the stream has not begun or the client is
        behind."""
        return self._chunked and self.begun and self._connection.try_write_chunk(events)

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Writes events, and waits for a client that is behind. The first write sends the status."""
        if not last and self.try_write(events):
            return
        if not self.begun:
            await self._begin()
        await self._connection.until_writable()
        await self._exchange.send({"type": "http.response.body", "body": events, "more_body": not last})

    async def _begin(self) -> None:
        self._exchange.is_stream = True
        await self._exchange.send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self._headers,
                ],
            }
        )


class AnswerStream(Protocol):
    """How one API writes an answer as events."""

    def events(self, choice: Choice, delta: Delta) -> bytes: ...

    def closing(self) -> bytes: ...


class Delivery:
    """Streams one answer to its client, whichever API it belongs to.

    Tokens in the middle of an answer, for a client that keeps up, are written by `_show`, in the inbox's
    handler, because waking this task would cost as much as everything else that is done with a token. The
    task writes everything else: the beginning, the end, failures, and to a client that is behind.
    """

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        answer: AnswerStream,
        stream: EventStream,
        trace: RequestTrace | None = None,
    ) -> None:
        self._generation = generation
        self._by_life = {choice.life: choice for choice in choices}
        self._answer = answer
        self._stream = stream
        self._trace = trace
        self._unfinished = len(choices)
        self._unwritten: list[bytes] = []

    async def run(self) -> None:
        """Runs to the answer's end. Raises a choice's failure, after writing what came before it if the
        stream has begun."""
        self._generation.show_with(self._show)
        try:
            await self._deliver()
        finally:
            self._generation.show_with(None)

    async def _deliver(self) -> None:
        turn = LoopTurn()
        while self._unfinished:
            failure = None
            news = await self._generation.news()
            turn.begin()
            for life in news:
                choice = self._by_life[life]
                self._read(life)
                while choice.behind:
                    await turn.pass_on()
                    self._read(life)
                    await self._flush(WRITE_BYTES)
                failure = choice.failed or failure
                await self._flush(WRITE_BYTES)
                await turn.pass_on()
            if failure is not None:
                if self._stream.begun:
                    await self._flush()
                raise failure
            if self._unfinished:
                await self._flush()
        await self._stream.write(b"".join(self._unwritten) + self._answer.closing(), last=True)
        self._note_written()

    def _show(self, life: RequestLife) -> bool:
        """Writes the tokens that just arrived. Returns False when the task must write them."""
        if life.ended or not self._stream.begun or self._unwritten:
            return False
        self._read(life)
        events = b"".join(self._unwritten)
        # Reading may have found a stop string, which ends the life.
        if life.ended or not self._stream.try_write(events):
            return False
        self._unwritten.clear()
        self._note_written()
        return True

    def _read(self, life: RequestLife) -> None:
        choice = self._by_life[life]
        delta = choice.advance()
        if delta is None:
            return
        self._unfinished -= delta.finish_reason is not None
        self._unwritten.append(self._answer.events(choice, delta))
        life.ledger.logprobs.forget(choice.completion_tokens)

    async def _flush(self, beyond: int = 0) -> None:
        """Writes what is unwritten if it is more than `beyond` bytes. Waits for a client that is behind."""
        if sum(map(len, self._unwritten)) <= beyond:
            return
        events = b"".join(self._unwritten)
        self._unwritten.clear()
        await self._stream.write(events)
        self._note_written()

    def _note_written(self) -> None:
        if self._trace is not None:
            self._trace.flushed(time.monotonic())
