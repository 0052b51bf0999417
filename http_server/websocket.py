"""One WebSocket on an upgraded call. wsproto handles the frames; this class has the deadlines, size limits
and close."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.types import Message, Receive
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.utilities import LocalProtocolError, generate_accept_token

from tandem.base.errors import InvalidRequest, Overloaded, RequestError
from tandem.http_server.turns import Turns

GOING_AWAY, UNSUPPORTED, SILENT, TOO_BIG, TRY_LATER = 1001, 1003, 1008, 1009, 1013

# How much is read at once, and how many frames.
READ_BYTES, READ_FRAMES = 16 << 10, 16
# A close frame has room for 123 bytes.
LONGEST_REASON = 120


class UpgradeRequired(RequestError):
    code = "upgrade_required"
    http_status = 426


class UpgradeRequest(Protocol):
    """The request to be upgraded, and the bytes in both directions afterwards."""

    headers: list[tuple[bytes, bytes]]
    receive: Receive

    async def send(self, message: Message) -> None: ...


class Memory(Protocol):
    """Counts what the socket keeps of messages that have not been taken yet."""

    def grow(self, size: int) -> None:
        """Raises Overloaded when there is no room for it."""

    def shrink(self, size: int) -> None: ...


class WebSocket:
    """A WebSocket with one reading task. Several tasks may write, one message at a time."""

    def __init__(
        self,
        exchange: UpgradeRequest,
        memory: Memory,
        *,
        most_bytes: int,
        ping_s: float,
        idle_s: float,
        turns: Turns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._memory = memory
        self._clock = clock
        self._turns = turns
        self._most_bytes = most_bytes
        self._ping_s = ping_s
        self._idle_s = idle_s
        self._frames = Connection(ConnectionType.SERVER)
        self._parts: list[str] = []
        self._size = 0
        self._kept = 0  # counted in memory for the parts
        self._messages: list[tuple[str, int]] = []  # each with what is counted for it
        self._taken = 0  # counted for the message that was returned last
        self._sending = asyncio.Lock()
        self._ended = False
        self.stopped = False  # stopped by the router
        # an answer is being made, so the client need not send anything
        self.is_busy: Callable[[], bool] = lambda: False

    async def accept(self, first: Iterable[bytes]) -> None:
        """Upgrades the connection and sends the first message. Raises UpgradeRequired or InvalidRequest when
        the request is no such upgrade."""
        headers = dict(self._exchange.headers)
        options = [option.strip().lower() for option in headers.get(b"connection", b"").split(b",")]
        if headers.get(b"upgrade", b"").lower() != b"websocket" or b"upgrade" not in options:
            raise UpgradeRequired("this path speaks WebSocket: connect to it with a ws:// or wss:// address")
        if headers.get(b"sec-websocket-version") != b"13":
            raise UpgradeRequired("sec-websocket-version: must be 13")
        key = headers.get(b"sec-websocket-key")
        if not key:
            raise InvalidRequest("sec-websocket-key: is missing")
        answer = [
            (b"upgrade", b"websocket"),
            (b"connection", b"Upgrade"),
            (b"sec-websocket-accept", generate_accept_token(key)),
        ]
        offered = [name.strip() for name in headers.get(b"sec-websocket-protocol", b"").split(b",")]
        if b"realtime" in offered:
            answer.append((b"sec-websocket-protocol", b"realtime"))
        await self._exchange.send({"type": "http.response.start", "status": 101, "headers": answer})
        await self.send(first)

    async def receive(self) -> str | None:
        """Returns the next message, or None when the client closed the connection, is gone or silent, or the
        router stops. Only whole messages show that a client is there: pings, pongs and parts of messages do
        not keep a session."""
        self._memory.shrink(self._taken)
        self._taken = 0
        heard, pinged = self._clock(), False
        while not self._messages and not self._ended:
            if self.is_busy():
                heard = self._clock()
            elif self._clock() - heard > self._idle_s:
                await self.close(SILENT, f"no event for {self._idle_s:g} s")
                break
            try:
                async with asyncio.timeout(self._ping_s):
                    message = await self._exchange.receive()
            except TimeoutError:
                if pinged:
                    await self.close(SILENT, "no answer to a ping")
                else:
                    pinged = True
                    await self._write(Ping())
                continue
            pinged = False
            if message["type"] == "http.disconnect":
                self._ended = True
            else:
                await self._read(message["body"])
                if not message["more_body"]:
                    self._ended = self.stopped = True  # the session says goodbye
        if not self._messages:
            return None
        message_text, self._taken = self._messages.pop(0)
        return message_text

    async def _read(self, data: bytes) -> None:
        for at in range(0, len(data), READ_BYTES):
            await self._turns.turn()
            if self._frames.state in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
                self._frames.receive_data(data[at : at + READ_BYTES])
            await self._take_events()

    async def _take_events(self) -> None:
        for number, event in enumerate(self._frames.events(), 1):
            if number % READ_FRAMES == 0:
                await self._turns.turn()
            if isinstance(event, Ping):
                await self._write(event.response())
            elif isinstance(event, CloseConnection):
                await self.close(event.code if event.code != 1005 else 1000, "")
            elif isinstance(event, BytesMessage):
                await self.close(UNSUPPORTED, "events are text")
            elif isinstance(event, TextMessage):
                self._size += len(event.data.encode())
                if self._size > self._most_bytes:
                    await self.close(TOO_BIG, f"an event has at most {self._most_bytes} bytes")
                    return
                try:
                    self._memory.grow(size := sys.getsizeof(event.data))
                except Overloaded as error:
                    await self.close(TRY_LATER, str(error)[:LONGEST_REASON])
                    return
                self._kept += size
                self._parts.append(event.data)
                if event.message_finished:
                    self._messages.append(("".join(self._parts), self._kept))
                    self._parts, self._size, self._kept = [], 0, 0
            elif not isinstance(event, Pong):
                continue

    async def send(self, message: Iterable[bytes]) -> None:
        """Sends a message that is made piece by piece. Each piece is a frame, and whole UTF-8. Between two of
        them the event loop goes on."""
        if self._ended and not self.stopped:
            return
        async with self._sending:
            before: bytes | None = None
            for piece in message:
                if before is not None:
                    await self._write(TextMessage(data=before.decode(), message_finished=False))
                    await self._turns.turn()
                before = piece
            if before is not None:
                await self._write(TextMessage(data=before.decode(), message_finished=True))

    async def close(self, code: int, reason: str) -> None:
        if not self._ended:
            self._ended = True
            await self._write(CloseConnection(code=code, reason=reason))

    async def _write(self, event: Event) -> None:
        try:
            frame = self._frames.send(event)
        except LocalProtocolError:
            return  # it is closed already
        await self._exchange.send({"type": "http.response.body", "body": frame, "more_body": True})

    async def goodbye(self, code: int, reason: str) -> None:
        """Sends a close frame unless one was sent, and ends the call."""
        if self._frames.state is ConnectionState.OPEN:
            self._ended = True
            await self._write(CloseConnection(code=code, reason=reason))
        await self._exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
