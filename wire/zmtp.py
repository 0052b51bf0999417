"""What ZMQ's PUSH and PULL sockets say to each other over TCP: ZMTP 3.0 (rfc.zeromq.org/spec/23), without I/O.

Both sides greet each other in 64 bytes that say which version and which security they speak (here none), and name their
kind of socket in a READY command. When the PUSH side has heard the other's, it sends frames: a byte of flags, the length
in one byte or eight, the body.
"""

from __future__ import annotations

from tandem.wire.errors import TandemError

_MORE, _LONG, _COMMAND = 1, 2, 4
MAX_FRAMES = 16  # in a message; ours have one

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x00"
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING_BYTES = 64


def _opening(socket_type: bytes) -> bytes:
    """What one side may say at once, before it has heard anything."""
    greeting = (_SIGNATURE + _VERSION + _MECHANISM).ljust(_GREETING_BYTES, b"\0")
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04" + socket_type
    return greeting + bytes([_COMMAND, len(ready)]) + ready


PULL_OPENING = _opening(b"PULL")
PUSH_OPENING = _opening(b"PUSH")


def message(body: bytes) -> bytes:
    """Of one frame."""
    if len(body) < 256:
        return b"\0%c%b" % (len(body), body)
    return bytes([_LONG]) + len(body).to_bytes(8, "big") + body


class ProtocolError(TandemError):
    """Not what such a socket says. Nothing after it on the same connection can be trusted."""


class MessageReader:
    """One connection's bytes, in pieces of any size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # of a message
        self._buffer = bytearray()
        self._at = 0  # everything before it has been read
        self._frames: list[bytes] = []  # of a message that goes on
        self._frame_bytes = 0  # of those
        self.greeted = False
        self.ready = False  # the other side has introduced itself, and listens

    def feed(self, data: bytes) -> None:
        del self._buffer[: self._at]
        self._at = 0
        self._buffer += data

    def next_message(self) -> list[bytes] | None:
        """Its frames; None until more bytes come. Raises ProtocolError."""
        if not self.greeted and not self._read_greeting():
            return None
        while (head := self._head()) is not None:
            flags, begin, length = head
            if length + self._frame_bytes > self._max_bytes:
                raise ProtocolError(f"a message has more than {self._max_bytes} bytes")
            if len(self._frames) == MAX_FRAMES:
                raise ProtocolError(f"a message has more than {MAX_FRAMES} frames")
            end = begin + length
            if end > len(self._buffer):
                return None
            body = bytes(self._buffer[begin:end])
            self._at = end
            if flags & _COMMAND:
                self.ready = True  # the first is READY, and later ones ask for nothing
                continue
            self._frames.append(body)
            self._frame_bytes += length
            if not flags & _MORE:
                frames, self._frames, self._frame_bytes = self._frames, [], 0
                return frames
        return None

    def _head(self) -> tuple[int, int, int] | None:
        """Flags, where the body begins, and how long it is."""
        buffer, at = self._buffer, self._at
        if len(buffer) < at + 2:
            return None
        flags = buffer[at]
        if not flags & _LONG:
            return flags, at + 2, buffer[at + 1]
        begin = at + 9
        if len(buffer) < begin:
            return None
        return flags, begin, int.from_bytes(buffer[at + 1 : begin], "big")

    def _read_greeting(self) -> bool:
        greeting = self._buffer[:_GREETING_BYTES]
        signed = greeting[:1] + greeting[9:10]  # what stands between says nothing since version 1
        if signed != b"\xff\x7f"[: len(signed)]:
            raise ProtocolError("it is no ZMQ socket")
        if len(greeting) < _GREETING_BYTES:
            return False
        if greeting[10] < _VERSION[0] or greeting[12:32] != _MECHANISM:
            raise ProtocolError("it does not speak ZMTP 3 without security")
        self._at = _GREETING_BYTES
        self.greeted = True
        return True
