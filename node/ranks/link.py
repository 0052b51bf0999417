"""The link between rank 0's machine and another one of its node: the house's sockets, so encrypted, and each side knows the other's key.

A link is whole or over. Its messages are numbered, and one that is missing ends the node: a step that a machine did not get is a step
that all others wait for.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tandem.node.ranks.messages import FromMachine, LineBytes, OneStep, ToMachine
from tandem.wire.errors import InternalError, NodeLost
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
    """From any thread. `letter` makes one of a number and a message."""

    def __init__(
        self, outbox: Outbox, endpoint: str, letter: Callable[[int, ToMachine | FromMachine], msgspec.Struct]
    ) -> None:
        self._outbox = outbox
        self._endpoint = endpoint
        self._letter = letter
        self._lock = threading.Lock()  # what has the lower number leaves first
        self._sent = 0

    def send(self, body: ToMachine | FromMachine) -> None:
        """Raises NodeLost when the other machine has not read for long."""
        with self._lock:
            self._sent += 1
            self._outbox.send(self._endpoint, self._letter(self._sent, body))


class Numbers:
    """Of what comes: one after the other."""

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
        raise InternalError(
            f"a step's arrays are larger than {MAX_FRAME_BYTES >> 21} MiB, which go to another machine"
        )
    return OneStep([(array.dtype.str, list(array.shape), array.tobytes()) for array in arrays])


def arrays_of(step: OneStep) -> list[np.ndarray]:
    return [np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in step.arrays]


class Relay:
    """Carries the bytes of one rank's line over a link: this end of the line is ours, the other end a rank's, or that of what rank 0
    moves its KV with. Bytes may be put from one thread while another one passes on what comes."""

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
                self._unsent.clear()  # its reader has ended, which others notice

    def pass_on(self) -> None:
        """What has come from our end of the line, in one message."""
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


class Bell:
    """Wakes a thread that polls it, from any other."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
