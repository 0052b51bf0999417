"""Requests in any framing and in any pieces reach the application as they were sent, and a damaged one changes none before it."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from tandem.http_server.protocol import HttpConnection
from tandem.http_server.serving import HttpServer
from tandem.http_server.settings import ServerLimits, ServerTimeouts

PASSES = 200  # of the event loop, in which everything that was sent is read and answered


class Sent(NamedTuple):
    path: str
    body: bytes
    pieces: list[int] | None  # the sizes of its chunks, or None for a Content-Length

    def data(self, *, last: bool) -> bytes:
        lines = [f"POST {self.path} HTTP/1.1", "host: x", *(["connection: close"] if last else [])]
        if self.pieces is None:
            return "\r\n".join([*lines, f"content-length: {len(self.body)}", "", ""]).encode() + self.body
        left, coded = self.body, b""
        for size in [*self.pieces, len(self.body)]:
            piece, left = left[:size], left[size:]
            coded += b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
        return "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode() + coded + b"0\r\n\r\n"


# A body may look like the request after it, or like the end of its own chunks.
BODIES = st.binary(max_size=60) | st.sampled_from(
    [b"GET /inside HTTP/1.1\r\nhost: x\r\n\r\n", b"0\r\n\r\nGET /inside HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n\r\n"]
)
REQUESTS = st.lists(
    st.builds(
        Sent, st.sampled_from(["/", "/a", "/a?b=c"]), BODIES, st.none() | st.lists(st.integers(1, 20), max_size=4)
    ),
    min_size=1,
    max_size=4,
)
CUTS = st.lists(st.integers(1, 40), max_size=20)


class Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.came = b""
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.came += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class Conversation:
    """One connection to a server of its own, which notes what reaches its application."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, bytes]] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.arrived.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    async def send(self, data: bytes, cuts: list[int], *, until_closed: bool) -> list[int]:
        """Sends the bytes in pieces of these sizes, and returns the status of each answer: of all until the server closes the
        connection, or of those that need no further bytes."""
        loop = asyncio.get_running_loop()
        patient = ServerTimeouts(header=60, body=60, keep_alive=60, slow_reader=60)
        server = HttpServer(self._app, ServerLimits(1000, 10), patient, lambda *_: b"{}", lambda: None)
        here, there = socket.socketpair()
        there.setblocking(False)
        await loop.connect_accepted_socket(lambda: HttpConnection(server, loop), there)
        transport, client = await loop.create_connection(Client, sock=here)
        for piece in _cut(data, cuts):
            transport.write(piece)
            await asyncio.sleep(0)
        if until_closed:
            async with asyncio.timeout(30):
                await client.closed.wait()
        for _ in range(PASSES):
            await asyncio.sleep(0)
        transport.close()
        while server.connections:  # noqa: ASYNC110 (what is waited for is a few passes away)
            await asyncio.sleep(0)
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", client.came)]


def _cut(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for size in cuts:
        yield data[:size]
        data = data[size:]
    yield data


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, cuts=CUTS)
def test_requests_arrive_as_they_were_sent(runner: asyncio.Runner, requests: list[Sent], cuts: list[int]) -> None:
    data = b"".join(one.data(last=one is requests[-1]) for one in requests)
    conversation = Conversation()
    assert runner.run(conversation.send(data, cuts, until_closed=True)) == [200] * len(requests)
    assert conversation.arrived == [(one.path.partition("?")[0], one.body) for one in requests]


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, cuts=CUTS, draw=st.data())
def test_a_damaged_request_changes_none_before_it(
    runner: asyncio.Runner, requests: list[Sent], cuts: list[int], draw: st.DataObject
) -> None:
    parts = [one.data(last=one is requests[-1]) for one in requests]
    data = b"".join(parts)
    place = draw.draw(st.integers(0, len(data) - 1), label="place")
    more = draw.draw(st.binary(max_size=2), label="instead")
    conversation = Conversation()
    statuses = runner.run(conversation.send(data[:place] + more + data[place + 1 :], cuts, until_closed=False))
    whole, size = 0, 0
    for part in parts:
        size += len(part)
        whole += size <= place
    before = [(one.path.partition("?")[0], one.body) for one in requests[:whole]]
    assert conversation.arrived[:whole] == before
    assert all(status == 200 or 400 <= status < 500 for status in statuses)
