"""Reads multipart/form-data piece by piece, so that a large file is never whole in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from tandem.base.errors import InvalidRequest

MOST_HEADER_BYTES = 8 << 10  # of one part
MOST_PARTS = 16
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_FILENAME = re.compile(r'[;\s]filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


class PartBegins(msgspec.Struct, frozen=True):
    name: str
    filename: str | None  # None: a field


class FormReader:
    """`feed` it the body; it yields a PartBegins, then the part's bytes in pieces. `done` after the last boundary."""

    def __init__(self, content_type: str) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        found = _BOUNDARY.search(content_type)
        if kind != "multipart/form-data" or found is None:
            raise InvalidRequest(
                f"content-type: must be multipart/form-data with a boundary, not {content_type[:100]!r}"
            )
        self._between = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._buffer = bytearray(b"\r\n")  # the first boundary has no line before it
        self._state: Literal["before", "boundary", "header", "data", "done"] = "before"
        self._parts = 0

    @property
    def done(self) -> bool:
        return self._state == "done"

    def feed(self, data: bytes) -> Iterator[PartBegins | bytes]:
        self._buffer += data
        while True:
            if self._state in ("before", "data"):
                piece, found = self._to_boundary()
                if piece and self._state == "data":
                    yield piece
                if not found:
                    return
                self._state = "boundary"
            elif self._state == "boundary":
                if len(self._buffer) < 2:
                    return
                if self._buffer.startswith(b"--"):
                    self._state = "done"
                    continue
                if not self._buffer.startswith(b"\r\n"):
                    raise InvalidRequest("the form's boundary is followed by something else than a line's end")
                self._state = "header"
            elif self._state == "header":
                # With the line's end after the boundary, a part without headers ends like any other.
                end = self._buffer.find(b"\r\n\r\n")
                if end > MOST_HEADER_BYTES or (end < 0 and len(self._buffer) > MOST_HEADER_BYTES):
                    raise InvalidRequest(
                        f"the header of one of the form's parts has more than {MOST_HEADER_BYTES} bytes"
                    )
                if end < 0:
                    return
                yield self._begin(bytes(self._buffer[:end]))
                del self._buffer[: end + 4]
                self._state = "data"
            else:
                self._buffer.clear()
                return

    def _to_boundary(self) -> tuple[bytes, bool]:
        """Takes the bytes before the next boundary, or those that certainly come before it."""
        at = self._buffer.find(self._between)
        if at >= 0:
            piece = bytes(self._buffer[:at])
            del self._buffer[: at + len(self._between)]
            return piece, True
        safe = max(0, len(self._buffer) - len(self._between) + 1)
        piece = bytes(self._buffer[:safe])
        del self._buffer[:safe]
        return piece, False

    def _begin(self, header: bytes) -> PartBegins:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise InvalidRequest(f"the form has more than {MOST_PARTS} parts")
        for line in header.decode("utf-8", "replace").split("\r\n"):
            field, _, value = line.partition(":")
            if field.strip().lower() != "content-disposition":
                continue
            if (name := _NAME.search(value)) is not None:
                filename = _FILENAME.search(value)
                return PartBegins(_plain(name[1]), _plain(filename[1]) if filename is not None else None)
        raise InvalidRequest("one of the form's parts has no name (Content-Disposition: form-data; name=...)")


def _plain(text: str) -> str:
    """A quoted name as clients mean it: browsers and httpx write a quote in it as %22."""
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"')
