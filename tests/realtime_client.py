"""A minimal client of /v1/realtime that sends and receives single events."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, Event, Request, TextMessage

LONGEST_S = 60.0


class RealtimeClient:
    def __init__(self, url: str, *, receive_buffer: int = 0, query: str = "", **headers: str) -> None:
        address = httpx.URL(url)
        assert address.port is not None
        self._socket = socket.socket()
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(LONGEST_S)
        self._socket.connect((address.host, address.port))
        self._frames = WSConnection(ConnectionType.CLIENT)
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = Request(host="x", target=f"/v1/realtime{query}", extra_headers=extra)
        self._socket.sendall(self._frames.send(request))
        self._events: list[Event] = []
        self.opened = self.next_event()

    def next_event(self) -> Event:
        while not self._events:
            data = self._socket.recv(65536)
            self._frames.receive_data(data or None)
            self._events = list(self._frames.events())
        return self._events.pop(0)

    def say(self, kind: str, **fields: Any) -> None:
        self.send(TextMessage(data=json.dumps({"type": kind, **fields})))

    def send(self, event: TextMessage | CloseConnection) -> None:
        self._socket.sendall(self._frames.send(event))

    def hear(self, kind: str) -> dict[str, Any]:
        """Waits for the next event of this type and returns it. Fails at once if the server sends an error event."""
        text = ""
        while True:
            event = self.next_event()
            assert isinstance(event, TextMessage), event
            text += event.data
            if event.message_finished:
                found: dict[str, Any] = json.loads(text)
                text = ""
                if found["type"] == kind:
                    return found
                assert found["type"] != "error", found

    def close(self) -> None:
        self._socket.close()

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)
