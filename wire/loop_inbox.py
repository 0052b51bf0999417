"""An Inbox without a thread, for a process whose work is an asyncio event loop anyway.

ZMQ's own thread receives; the loop is woken by the socket's file descriptor and decodes there. Between a message's
arrival and its handler there is one switch of threads instead of two, which is most of what a lone token costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from wire.sockets import bind_pull_socket, decode_frames

logger = logging.getLogger(__name__)

M = TypeVar("M")

# Others on the loop get their turn in between.
MESSAGES_PER_TURN = 256


class LoopInbox(Generic[M]):
    """Like Inbox in all that its owner sees, but made, used and closed on the event loop, where `on_message` runs."""

    def __init__(self, host: str, message_type: Any, on_message: Callable[[M], None], *, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._on_message = on_message
        self._name = name
        self.malformed = 0
        self.handler_errors = 0
        self.died: str | None = None
        self._closed = False
        self._context = zmq.Context()
        self._socket = bind_pull_socket(self._context, host, 0, name)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._descriptor: int = self._socket.FD
        self._loop.add_reader(self._descriptor, self._receive)

    def _receive(self) -> None:
        """The descriptor tells of changes, not of state: read until there is nothing, or come back.

        Asking whether there is more costs a fraction of being told by an exception that there is not.
        """
        socket = self._socket
        try:
            for _ in range(MESSAGES_PER_TURN):
                if self._closed or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
                frame = socket.recv(zmq.NOBLOCK)
                self._handle([frame, *socket.recv_multipart()] if socket.getsockopt(zmq.RCVMORE) else [frame])
        except zmq.ZMQError as error:
            self.died = f"{type(error).__name__}: {error}"
            logger.exception("%s: receiving failed", self._name)
            self._loop.remove_reader(self._descriptor)
            return
        self._loop.call_soon(self._receive)

    def _handle(self, frames: list[bytes]) -> None:
        message = decode_frames(self._decoder, frames, self._name)
        if message is None:
            self.malformed += 1
            return
        try:
            self._on_message(message)
        except Exception:
            self.handler_errors += 1
            logger.exception("%s: handling %s failed", self._name, type(message).__name__)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
        self._context.term()
