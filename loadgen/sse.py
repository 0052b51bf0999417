"""Server-sent events, from bytes that arrive in any pieces."""

from __future__ import annotations


class EventSplitter:
    """Only the data of an event matters here; names, ids and comments (servers' keep-alives) do not."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now."""
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        return [payload for event in events if (payload := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    if b"\n" not in event and event.startswith(b"data: "):
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
