"""The link between rank 0's machine and another machine of its node, over `wire.sockets`: encrypted, and each side knows the other's key.

Its messages are numbered, and a missing one ends the node: all other machines would wait for the machine that missed a step.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tandem.base.errors import InternalError, NodeLost
from tandem.node.ranks.messages import FromMachine, LineBytes, OneStep, ToMachine
from tandem.wire.sockets import MAX_FRAME_BYTES, Outbox

_READ_BYTES = 1 << 18


class LetterToMachine(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: ToMachine


class LetterFromMachine(msgspec.Struct, frozen=True, array_like=True):
    machine: int
    number: int
    body: FromMachine


class SendingEnd:
    """Sends numbered messages to the other machine. Used from any thread. `letter` wraps a number and a message."""

    def __init__(
        self, outbox: Outbox, endpoint: str, letter: Callable[[int, ToMachine | FromMachine], msgspec.Struct]
    ) -> None:
        self._outbox = outbox
        self._endpoint = endpoint
        self._letter = letter
        self._lock = threading.Lock()  # messages leave in the order of their numbers
        self._sent = 0

    def send(self, body: ToMachine | FromMachine) -> None:
        """Queues a message. Raises NodeLost when the other machine has not read for long."""
        with self._lock:
            self._sent += 1
            self._outbox.send(self._endpoint, self._letter(self._sent, body))


class Numbers:
    """Checks that received messages have consecutive numbers; `check` raises NodeLost if one is missing."""

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._last = 0

    def check(self, number: int) -> None:
        if number != self._last + 1:
            raise NodeLost(
                f"messages of {self._sender} were lost: number {number} came after {self._last}, as when a connection broke"
            )
        self._last = number


def step_of(arrays: Sequence[np.ndarray]) -> OneStep:
    if sum(array.nbytes for array in arrays) > MAX_FRAME_BYTES // 2:
        raise InternalError(f"a step's arrays are larger than {MAX_FRAME_BYTES >> 21} MiB, which go to another machine")
    return OneStep([(array.dtype.str, list(array.shape), array.tobytes()) for array in arrays])


def arrays_of(step: OneStep) -> list[np.ndarray]:
    return [np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in step.arrays]


class Relay:
    """Carries the bytes of one rank's line over a link. It owns one end of a socket pair; a rank, or the part of rank 0 that moves KV,
    has the other end. One thread may call `put` while another calls `pass_on`."""

    def __init__(self, rank: int, sock: socket.socket, send: Callable[[LineBytes], None]) -> None:
        sock.setblocking(False)
        self._rank = rank
        self._sock = sock
        self._send = send
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self.is_over = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, data: bytes) -> None:
        with self._lock:
            self._unsent += data
        self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: self._sock.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the reader has ended; the thread that watches the ranks handles that

    def pass_on(self) -> None:
        """Sends the bytes that have come on the line over the link, in one message."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_over = True
            return
        self._send(LineBytes(self._rank, data))

    def close(self) -> None:
        self._sock.close()


class Eventfd:
    """An eventfd by which any thread wakes the thread that polls it."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def wake(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
