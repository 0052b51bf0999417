"""What never becomes a request: headers and bodies that are too large, too slow, or not HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from tandem.router.config import Limits, Timeouts
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.raw_http import connect, parse, post, read_to_end, talk

LIMITS = Limits(header_bytes=4096, body_bytes=10_000, connections=6)


@pytest.fixture
def router(start_router: StartRouter) -> Iterator[RunningRouter]:
    running = start_router(limits=LIMITS)
    yield running
    assert running.complete(max_tokens=2).status_code == 200  # it still answers


@pytest.fixture
def impatient(start_router: StartRouter) -> Iterator[RunningRouter]:
    running = start_router(limits=LIMITS, timeouts=Timeouts(header=0.3, body=0.3, keep_alive=30))
    yield running
    assert running.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize("size", [4500, 60_000, 200_000])
def test_a_header_that_is_too_large(router: RunningRouter, size: int) -> None:
    status, headers, body = talk(router, post(b"", x_big="a" * size, content_length="0"))
    assert status == 431
    assert headers["connection"] == "close"
    assert body["error"]["code"] == "header_too_large"


def test_a_path_that_is_too_large(router: RunningRouter) -> None:
    status, _, _ = talk(router, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert status == 431


def test_a_header_that_never_ends(impatient: RunningRouter) -> None:
    status, headers, body = talk(impatient, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
    assert status == 408
    assert headers["connection"] == "close"
    assert body["error"]["type"] == "invalid_request_error"


def test_the_second_header_on_a_connection_is_timed_too(impatient: RunningRouter) -> None:
    with closing(connect(impatient)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        first = b""
        while b"ok" not in first:
            first += connection.recv(65536)
        connection.sendall(b"GET /health HTT")
        status, _, _ = parse(read_to_end(connection))
    assert status == 408


def test_a_connection_that_never_says_anything_is_closed(impatient: RunningRouter) -> None:
    with closing(connect(impatient)) as connection:
        assert read_to_end(connection) == b""


def test_a_body_that_never_ends(impatient: RunningRouter) -> None:
    status, headers, body = talk(impatient, post(b'{"model": ', content_length="500"))
    assert status == 408
    assert headers["connection"] == "close"
    assert "within 0.3 s" in body["error"]["message"]


def test_a_body_that_is_too_large_by_its_own_account(router: RunningRouter) -> None:
    data = json.dumps({"model": "fake", "prompt": "x" * 20_000}).encode()
    answer = router.client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_body_that_is_too_large_in_chunks(router: RunningRouter) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    answer = router.client.post(
        "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http(router: RunningRouter, data: bytes) -> None:
    status, headers, body = talk(router, data)
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_too_many_connections(router: RunningRouter) -> None:
    router.client.close()
    held = [connect(router) for _ in range(LIMITS.connections)]
    for connection in held:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    with closing(connect(router)) as one_more:
        status, headers, body = parse(read_to_end(one_more))
    assert status == 503
    assert headers["retry-after"]
    assert body["error"]["code"] == "overloaded"
    for connection in held:
        connection.close()
    router.client = router.new_client()
    router.wait_for(lambda: router.connections() == 0, "settled")


def test_slow_headers_do_not_keep_others_waiting(impatient: RunningRouter) -> None:
    slow = [connect(impatient) for _ in range(4)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    assert impatient.complete(max_tokens=3).status_code == 200
    assert [parse(read_to_end(connection))[0] for connection in slow] == [408] * 4
    for connection in slow:
        connection.close()


def test_two_requests_in_one_packet_are_both_answered(router: RunningRouter) -> None:
    with closing(connect(router)) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        assert read_to_end(connection).count(b"HTTP/1.1 200") == 2
