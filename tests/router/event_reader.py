"""A client that reads an event stream one event at a time, and may close the connection or stop reading at any moment."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.loops import PATIENCE_S


class EventReader:
    """Reads from a plain socket, because an HTTP library would read ahead, and tests control when the client reads."""

    def __init__(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        receive_buffer: int | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((parts.hostname, parts.port))
        data = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {parts.netloc}",
            "content-type: application/json",
            f"content-length: {len(data)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        self._buffer = b""
        self._body = b""
        self._ended = False
        self.status: int | None = None
        self.headers: dict[str, str] = {}

    def _more(self) -> bool:
        data = self.socket.recv(65536)
        self._buffer += data
        return bool(data)

    def read_header(self) -> int:
        while b"\r\n\r\n" not in self._buffer:
            if not self._more():
                raise ConnectionError("closed before the header was complete")
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(first.split()[1])
        return self.status

    def _read_chunk(self) -> bool:
        """Reads one chunk of the transfer coding. Returns False at the end of the body."""
        while True:
            size, found, rest = self._buffer.partition(b"\r\n")
            if found and len(rest) >= int(size, 16) + 2:
                break
            if not self._more():
                raise ConnectionError("the connection was closed in the middle of the body")
        length = int(size, 16)
        self._body += rest[:length]
        self._buffer = rest[length + 2 :]
        self._ended = length == 0
        return not self._ended

    def next_event(self) -> str | None:
        """The data of the next event; None at the end of the stream."""
        if self.status is None:
            self.read_header()
        while b"\n\n" not in self._body:
            if self._ended or not self._read_chunk():
                return None
        block, _, self._body = self._body.partition(b"\n\n")
        return "\n".join(line[6:] for line in block.decode().split("\n") if line.startswith("data: "))

    def text(self, count: int | None = None) -> str:
        """The next `count` characters of text, or all to the end. An event holds the characters that had come when it was written."""
        out = ""
        while count is None or len(out) < count:
            data = self.next_event()
            if data is None or data == "[DONE]":
                break
            body = json.loads(data)
            if "error" in body:
                raise AssertionError(body)
            for choice in body["choices"]:
                out += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return out

    def rest(self) -> list[Any]:
        """All events to the end: JSON bodies, and "[DONE]" as a string."""
        found: list[Any] = []
        while (data := self.next_event()) is not None:
            found.append(data if data == "[DONE]" else json.loads(data))
        return found

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
