"""Connections over HTTP: requests are read the same however their bytes arrive, each ends in bounded time, and a client that is still
sending can read the answer that ends it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tandem.http_server import protocol
from tandem.router.config import Limits, Timeouts
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


def test_who_goes_on_sending_is_closed_all_the_same_and_who_sends_much_sooner(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = draining(start_router)
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    with refused_while_sending(router):
        router.wait_for(lambda: router.connections() == 0, "closed")
    monkeypatch.setattr(protocol, "LINGER_S", 60)
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1000)
    with refused_while_sending(router) as connection:
        connection.sendall(b" " * 1001)
        router.wait_for(lambda: router.connections() == 0, "closed")
    with refused_while_sending(router):
        router.call(router.server.stop())  # does not wait for it


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
MUCH = b'{"prompt": "%b", "return_token_strs": true}' % (b"jq" * 60_000)


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/completions"])
def test_a_body_that_never_ends_behind_its_answer(start_router: StartRouter, path: str) -> None:
    router = start_router(timeouts=Timeouts(body=0.2, keep_alive=30))
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", path, content_length="500", content_encoding="br"))
        assert read_answer(connection)[0] in (404, 405, 415)
        connection.sendall(b"x")
        assert read_to_end(connection) == b""
    router.wait_for(lambda: router.connections() == 0, "closed")


def test_a_body_that_ends_behind_its_answer_leaves_an_idle_connection(start_router: StartRouter) -> None:
    router = start_router(timeouts=Timeouts(body=30, keep_alive=1))
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", "/nothing", content_length="5"))
        assert read_answer(connection)[0] == 404
        connection.sendall(b"xxxxx" + HEALTH)
        assert read_answer(connection)[0] == 200
        connection.sendall(post(b"", "/nothing", content_length="5"))
        assert read_answer(connection)[0] == 404
        connection.sendall(b"xxxxx")
        assert read_to_end(connection) == b""


def with_long_context(start_router: StartRouter, timeouts: Timeouts) -> RunningRouter:
    return start_router(prefill=0, node={"max_model_len": 1_000_000}, timeouts=timeouts).with_small_buffers()


@pytest.mark.parametrize("close", [{"connection": "close"}, {}], ids=["the last answer", "one with another behind it"])
def test_an_answer_that_nobody_reads(start_router: StartRouter, close: dict[str, str]) -> None:
    router = with_long_context(start_router, Timeouts(slow_reader=0.3, keep_alive=1))
    with closing(connect(router, receive_buffer=4096)) as connection:
        connection.sendall(post(MUCH, "/tokenize", content_length=str(len(MUCH)), **close) + (b"" if close else HEALTH))
        router.wait_for(lambda: router.connections() == 1, "it is there")
        router.wait_for(lambda: router.connections() == 0, "cut off", timeout_s=8)
    assert router.metric("tandem_slow_readers_cut_total") == 1
    assert router.complete(max_tokens=2).status_code == 200


@pytest.mark.slow
def test_who_reads_slowly_is_not_cut_off(start_router: StartRouter) -> None:
    """Slow: the answer takes several times as long as a client may go without taking any of it."""
    router = with_long_context(start_router, Timeouts(slow_reader=0.4, keep_alive=30))
    with closing(connect(router, receive_buffer=16384)) as connection:
        connection.sendall(post(MUCH, "/tokenize", content_length=str(len(MUCH)), connection="close"))
        size = 0
        while data := connection.recv(16384):
            size += len(data)
            time.sleep(0.02)  # its pace: nothing is waited for
    assert size > 800_000
    assert router.metric("tandem_slow_readers_cut_total") == 0


def test_a_client_that_waits_to_be_told_to_go_on(start_router: StartRouter) -> None:
    router = start_router()
    body = json.dumps({"model": "fake", "prompt": "the fox", "max_tokens": 2}).encode()
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", content_length=str(len(body)), expect="100-continue"))
        said = b""
        while not said.endswith(b"\r\n\r\n"):
            said += connection.recv(1)
        assert said == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_answer(connection)[0] == 200
        connection.sendall(post(b"", "/nothing", content_length="5", expect="100-continue"))
        assert read_answer(connection)[0] == 404, "whose body is not wanted"


def test_an_old_client_reads_to_the_end_of_the_connection(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    body = json.dumps({"model": "fake", "prompt": "the fox", "max_tokens": 3, "stream": True, "seed": 1})
    head_lines = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
    with closing(connect(router)) as connection:
        connection.sendall(head_lines.encode() + body.encode())
        answer = read_to_end(connection)
    assert b"transfer-encoding" not in answer
    assert b"connection: close" in answer
    assert answer.endswith(b"data: [DONE]\n\n")


def test_a_head_has_no_body(start_router: StartRouter) -> None:
    router = start_router()
    with closing(connect(router)) as connection:
        connection.sendall(
            b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answer = read_to_end(connection)
    first, _, rest = answer.partition(b"\r\n\r\n")
    assert first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 405"))
    assert rest.startswith(b"HTTP/1.1 200")


def test_an_upgrade_that_is_offered_is_not_taken(start_router: StartRouter) -> None:
    answer = start_router().client.get("/health", headers={"connection": "upgrade", "upgrade": "h2c"})
    assert answer.status_code == 200


def test_many_requests_in_one_packet_lie_unread_until_their_turn(start_router: StartRouter) -> None:
    router = start_router(limits=Limits(header_bytes=1000))
    one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with closing(connect(router)) as connection:
        connection.sendall(one * 500 + one.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert read_to_end(connection).count(b"HTTP/1.1 200") == 501
