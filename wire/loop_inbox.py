"""An Inbox without a thread, for a process whose work is an asyncio event loop anyway.

The loop itself accepts the peers' connections and reads them: between a message's arrival and its handler nobody else
has to wake up. Through ZMQ's own thread a lone token costs a router a quarter more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from tandem.wire.errors import ConfigurationError
from tandem.wire.sockets import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    MAX_FRAME_BYTES,
    decode_frames,
)
from tandem.wire.zmtp import PULL_OPENING, MessageReader, ProtocolError

logger = logging.getLogger(__name__)

M = TypeVar("M")

# Others on the loop get their turn in between. A message for many sequences can take milliseconds.
MESSAGES_PER_TURN = 256
TURN_S = 0.005
GREETING_TIMEOUT_S = 30.0


class LoopInbox(Generic[M]):
    """Like Inbox in all that its peers see, but made, used and closed on the event loop, where `on_message` runs.

    It has its address at once; whoever connects before `listen` waits. A peer that breaks the protocol loses its
    connection and nobody else does, so there is no end of the whole that nobody asked for.
    """

    def __init__(self, host: str, message_type: Any, on_message: Callable[[M], None], *, name: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._on_message = on_message
        self._peers: set[_Peer] = set()
        self._server: asyncio.Server | None = None
        self._closed = False
        self.name = name
        self.malformed = 0
        self.handler_errors = 0
        self._listener = _bind(host, name)
        self.endpoint = f"tcp://{_shown(host)}:{self._listener.getsockname()[1]}"

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Peer(self, loop), sock=self._listener)

    def connected(self, peer: _Peer) -> None:
        self._peers.add(peer)

    def disconnected(self, peer: _Peer) -> None:
        self._peers.discard(peer)

    def handle(self, frames: list[bytes]) -> None:
        if self._closed:
            return
        message = decode_frames(self._decoder, frames, self.name)
        if message is None:
            self.malformed += 1
            return
        try:
            self._on_message(message)
        except Exception:
            self.handler_errors += 1
            logger.exception("%s: handling %s failed", self.name, type(message).__name__)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for peer in self._peers:
            peer.drop()


class _Peer(asyncio.Protocol):
    """One connection, from somebody's Outbox."""

    def __init__(self, inbox: LoopInbox[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._inbox = inbox
        self._loop = loop
        self._reader = MessageReader(MAX_FRAME_BYTES)
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(PULL_OPENING)
        self._loop.call_later(GREETING_TIMEOUT_S, self._expect_greeting)
        self._inbox.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inbox.disconnected(self)

    def _expect_greeting(self) -> None:
        if not self._reader.greeted:
            self.drop()

    def drop(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._read()

    def _read(self) -> None:
        """What has come, up to a turn's worth; the rest, before anything newer, in the next turn."""
        until = time.monotonic() + TURN_S
        try:
            for _ in range(MESSAGES_PER_TURN):
                frames = self._reader.next_message()
                if frames is None:
                    if self._paused:
                        self._paused = False
                        self._transport.resume_reading()
                    return
                self._inbox.handle(frames)
                if time.monotonic() > until:
                    break
        except ProtocolError as error:
            logger.warning("%s: a connection is cut off: %s", self._inbox.name, error)
            self.drop()
            return
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._loop.call_soon(self._read)


def _bind(host: str, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Its connections inherit these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    try:
        listener.bind((host, 0))
        listener.listen(100)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"{name}: cannot listen on {host}: {error}") from error
    listener.setblocking(False)
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
