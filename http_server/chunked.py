"""A chunked body (RFC 9112, 7.1), without I/O. Anything that is not exactly one is refused, because two
readers could disagree about where it ends."""

from __future__ import annotations

import enum
import re

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


# The most lines that are read at once, two for each chunk: a client that sends single bytes delays no other client.
LINES_AT_ONCE = 512


class FramingError(Exception):
    """The bytes are not what HTTP/1.1 allows, so the request's end is unknown."""


class _State(enum.Enum):
    SIZE = "size"
    DATA = "data"
    DATA_END = "data end"
    TRAILER = "trailer"
    COMPLETE = "complete"


class ChunkedBody:
    """Takes a chunked body's bytes from the front of a buffer."""

    def __init__(self, most_line_bytes: int) -> None:
        self._most_line_bytes = most_line_bytes  # limits each size line, and all trailers together
        self._state = _State.SIZE
        self._left = 0  # bytes left of the current chunk
        self._trailer_bytes = 0
        self.has_rest = False  # the buffer has more that can be taken now

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    def take(self, buffer: bytearray) -> bytes:
        """Takes the body's next bytes from the buffer and returns them without framing. Where many chunks are short,
        `has_rest` says to call it again a little later. Raises FramingError."""
        data = bytearray()
        at = lines = 0
        self.has_rest = False
        while not self.complete:
            if lines == LINES_AT_ONCE:
                self.has_rest = True
                break
            lines += 1
            if self._state is _State.DATA:
                piece = buffer[at : at + self._left]
                data += piece
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._state = _State.DATA_END
            line = self._line(buffer, at)
            if line is None:
                break
            at += len(line) + 2
            self._on_line(line)
        del buffer[:at]
        return bytes(data)

    def _line(self, buffer: bytearray, at: int) -> bytearray | None:
        """Returns the next line without its end, or None until it is complete."""
        most = 0 if self._state is _State.DATA_END else self._most_line_bytes - self._trailer_bytes
        end = buffer.find(b"\n", at, at + most + 2)
        if end < 0:
            if len(buffer) - at > most + 1:
                raise FramingError(f"a chunk's {self._state.value} is not what ends it, or too long")
            return None
        if end == at or buffer[end - 1] != 13:
            raise FramingError("a line of a chunked body ends without a carriage return")
        return buffer[at : end - 1]

    def _on_line(self, line: bytearray) -> None:
        if self._state is _State.SIZE:
            found = _SIZE_LINE.fullmatch(line)
            if found is None:
                raise FramingError(f"a chunk's size must be a hexadecimal number, not {bytes(line[:40])!r}")
            self._left = int(found[1], 16)
            self._state = _State.DATA if self._left else _State.TRAILER
        elif self._state is _State.DATA_END:
            self._state = _State.SIZE  # the line is empty: `_line` allows it no bytes
        elif not line:
            self._state = _State.COMPLETE
        else:
            self._trailer_bytes += len(line) + 2
            if _TRAILER_LINE.fullmatch(line) is None:
                raise FramingError(f"a trailer must be a header, not {bytes(line[:40])!r}")
