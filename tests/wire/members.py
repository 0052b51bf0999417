"""Cluster members for tests: endpoints with this process's key, and sockets that send any bytes."""

from __future__ import annotations

import zmq

from tandem.wire import sockets
from tandem.wire.endpoints import Endpoint, parse_endpoint
from tandem.wire.sockets import public_key


def endpoint_at(port: int, host: str = "127.0.0.1") -> str:
    return str(Endpoint(public_key(), host, port))


def address_of(endpoint: str) -> tuple[str, int]:
    parsed = parse_endpoint(endpoint)
    assert parsed is not None
    return parsed.host, parsed.port


def connect_as_member(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.connect(sockets.shared.keys.protect_caller(socket, endpoint))
