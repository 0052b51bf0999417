"""HTTP on a plain socket, for requests that no HTTP library sends, and for tests that control when each side reads and writes."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import Any

import httpx

from tests.loops import PATIENCE_S
from tests.router.conftest import RunningRouter


def connect(router: RunningRouter, *, receive_buffer: int | None = None) -> socket.socket:
    address = httpx.URL(router.url)
    assert address.port is not None
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((address.host, address.port))
    return connection


def talk(router: RunningRouter, data: bytes) -> tuple[int, dict[str, str], Any]:
    """Sends `data` and reads the answer until the server closes the connection. Returns status, headers and body."""
    with closing(connect(router)) as connection:
        connection.sendall(data)
        return parse(read_to_end(connection))


def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while data := connection.recv(65536):
            answer += data
    except ConnectionResetError:
        pass
    return answer


def parse(answer: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)


def post(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Reads one answer with a Content-Length, and leaves the connection open."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1)
    _, headers, _ = parse(answer + b"null")
    for _ in range(int(headers["content-length"])):
        answer += connection.recv(1)
    return parse(answer)
