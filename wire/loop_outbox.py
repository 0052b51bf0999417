"""An Outbox on an asyncio event loop. Through ZMQ's own thread every message would wake up that thread, which then needs
five system calls where one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import msgspec

from tandem.wire.errors import NodeLost
from tandem.wire.sockets import RECONNECT_MAX_S, RECONNECT_S, SEND_QUEUE_FRAMES, queue_is_full
from tandem.wire.zmtp import PUSH_OPENING, MessageReader, ProtocolError, message

logger = logging.getLogger(__name__)

MAX_HEARD_BYTES = 4096  # a PULL socket introduces itself, and says no more


class LoopOutbox:
    """Like Outbox in all that its peers see, but made, used and closed on the event loop."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._connections: dict[str, _Connection] = {}
        self._closed = False

    def send(self, endpoint: str, said: msgspec.Struct) -> None:
        """Raises NodeLost when the endpoint's queue is full: its reader has been gone or stuck for long.

        After close() nothing is sent and nothing is raised: whoever closes has no use for what others still say.
        """
        self.send_frame(endpoint, self._encoder.encode(said))

    def send_frame(self, endpoint: str, frame: bytes) -> None:
        """The same, for a message that is encoded already."""
        if self._closed:
            return
        connection = self._connections.get(endpoint)
        if connection is None:
            connection = self._connections[endpoint] = _Connection(endpoint)
        connection.send(message(frame))

    def forget(self, endpoint: str) -> None:
        """Drop the connection and whatever is queued on it."""
        if (connection := self._connections.pop(endpoint, None)) is not None:
            connection.drop()

    async def close(self, linger_s: float = 0.2) -> None:
        """Idempotent. Waits up to `linger_s` for queued messages to leave."""
        if self._closed:
            return
        self._closed = True
        async with asyncio.TaskGroup() as leaving:
            for connection in self._connections.values():
                leaving.create_task(connection.end(linger_s))


class _Connection(asyncio.Protocol):
    """To one endpoint, made again whenever it is lost. Messages wait in the queue until the other side takes them."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._host, self._port = _address(endpoint)
        self._queue: deque[bytes] = deque()
        self._reader = MessageReader(MAX_HEARD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._takes = False  # the other side listens, and keeps up
        self._lost = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._stay_connected(), name=f"to {endpoint}")

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = RECONNECT_S
        while True:
            try:
                await loop.create_connection(lambda: self, self._host, self._port)
            except OSError as error:
                logger.debug("no connection to %s: %s", self._endpoint, error)
            else:
                await self._lost.wait()
                if self._reader.ready:
                    wait_s = RECONNECT_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_MAX_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._reader = MessageReader(MAX_HEARD_BYTES)
        self._lost.clear()
        self._transport.write(PUSH_OPENING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._takes = False
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        introduced = self._reader.ready
        self._reader.feed(data)
        try:
            self._reader.next_message()
        except ProtocolError as error:
            logger.warning("%s is no inbox: %s", self._endpoint, error)
            if self._transport is not None:
                self._transport.abort()
            return
        if self._reader.ready and not introduced:
            self._send_queued()

    def pause_writing(self) -> None:
        self._takes = False

    def resume_writing(self) -> None:
        self._send_queued()

    def _send_queued(self) -> None:
        self._takes = True
        while self._takes and self._queue and self._transport is not None:
            self._transport.write(self._queue.popleft())

    def send(self, data: bytes) -> None:
        if self._takes and self._transport is not None:
            self._transport.write(data)
            return
        if len(self._queue) >= SEND_QUEUE_FRAMES:
            raise queue_is_full(self._endpoint, SEND_QUEUE_FRAMES)
        self._queue.append(data)

    async def end(self, linger_s: float) -> None:
        """What was sent leaves if the other side takes it. A connection that is not there is not waited for."""
        self._task.cancel()
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(linger_s):
                await self._lost.wait()
        except TimeoutError:
            self.drop()

    def drop(self) -> None:
        self._task.cancel()
        self._queue.clear()
        if self._transport is not None:
            self._transport.abort()


def _address(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass  # a port that is none
    raise NodeLost(f"cannot connect to {endpoint!r}: it must be tcp://host:port")
