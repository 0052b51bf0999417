"""A client that is still sending must be able to read an answer that ends its connection. If the router closed the connection with bytes
unread, the kernel would reset it, and the answer would be lost."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tandem.http_server import protocol
from tandem.router.config import Limits
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.raw_http import connect, parse, post, read_answer, read_to_end

SIZE = 8 << 20  # more than lies in buffers between the two
LIMITS = Limits(header_bytes=4096, body_bytes=SIZE)


def draining(start_router: StartRouter) -> RunningRouter:
    router = start_router(limits=LIMITS)
    router.server.services.draining = True
    return router


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (post(b"", content_length=str(SIZE)), 503),
        (post(b"", "/nothing", content_length=str(SIZE), connection="close"), 404),
        (post(b"", "/tokenize", content_length=str(2 * SIZE)), 413),
        (post(b"", "/tokenize", x_big="a" * 5000, content_length=str(SIZE)), 431),
        (post(b"", "/tokenize", content_length=str(SIZE), transfer_encoding="chunked"), 400),
    ],
    ids=["draining", "asked to close", "too large", "header too large", "end in doubt"],
)
def test_who_is_still_sending_reads_the_answer(start_router: StartRouter, head: bytes, expected: int) -> None:
    router = draining(start_router)
    with closing(connect(router)) as connection:
        connection.sendall(head)
        connection.sendall(b" " * SIZE)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        status, headers, _ = parse(answer)
    assert status == expected
    assert headers["connection"] == "close"
    router.wait_for(lambda: router.connections() == 0, "closed")


def test_a_chunk_that_is_none_ends_a_request_that_is_being_read(start_router: StartRouter) -> None:
    router = start_router(limits=LIMITS)
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", transfer_encoding="chunked") + b"5\r\n12345\r\n")
        router.wait_for(lambda: router.server.services.bodies.held == 5, "it is being read")
        connection.sendall(b"no size\r\n" + b" " * SIZE)
        assert parse(read_to_end(connection))[0] == 400
    router.wait_for(lambda: router.server.services.bodies.held == 0, "given back")


def test_a_chunk_that_is_none_behind_the_answer_brings_no_second_answer(start_router: StartRouter) -> None:
    router = start_router()
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", "/nothing", transfer_encoding="chunked"))
        assert read_answer(connection)[0] == 404
        connection.sendall(b"no size\r\n")
        assert read_to_end(connection) == b""


@contextmanager
def refused_while_sending(router: RunningRouter) -> Iterator[socket.socket]:
    """The connection of a client that has got its answer and is still sending."""
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", content_length=str(SIZE)))
        assert parse(read_to_end(connection))[0] == 503
        yield connection


def test_who_goes_on_sending_is_closed_all_the_same(start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    router = draining(start_router)
    with refused_while_sending(router):
        router.wait_for(lambda: router.connections() == 0, "closed")


def test_who_goes_on_sending_much_is_closed_sooner(start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 60)
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1000)
    router = draining(start_router)
    with refused_while_sending(router) as connection:
        connection.sendall(b" " * 1001)
        router.wait_for(lambda: router.connections() == 0, "closed")


def test_stopping_does_not_wait_for_who_is_still_sending(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 60)
    router = draining(start_router)
    with refused_while_sending(router):
        router.call(router.server.stop())
