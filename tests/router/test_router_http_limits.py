"""What never becomes a request: headers and bodies that are too large, too slow, or not HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tandem.router.config import ApiKey, Limits, Timeouts
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.raw_http import connect, parse, post, read_answer, read_to_end, talk

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

    answer = router.client.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
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


KEYS = (ApiKey("a", "secret-a"), ApiKey("b", "secret-b"))
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def models(key: str) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(65536))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.settimeout(5)


@pytest.fixture
def keyed(start_router: StartRouter) -> Iterator[RunningRouter]:
    running = start_router(limits=LIMITS, api_keys=KEYS, timeouts=Timeouts(header=30, body=30))
    running.client.close()
    running.wait_for(lambda: running.connections() == 0, "no connections")
    yield running
    running.wait_for(lambda: running.connections() == 0, "all are gone")
    running.client = running.new_client()


def test_an_idle_stranger_gives_way_and_the_longest_idle_first(keyed: RunningRouter) -> None:
    with ExitStack() as stack:
        with_key = stack.enter_context(closing(connect(keyed)))
        with_key.sendall(models("secret-a"))
        assert read_answer(with_key)[0] == 200
        strangers = [stack.enter_context(closing(connect(keyed))) for _ in range(LIMITS.connections - 1)]
        for stranger in strangers:
            stranger.sendall(HEALTH)
            assert read_answer(stranger)[0] == 200
        other = stack.enter_context(closing(connect(keyed)))
        other.sendall(models("secret-b"))
        assert read_answer(other)[0] == 200
        assert [is_open(stranger) for stranger in strangers] == [False] + [True] * 4
        assert is_open(with_key)  # idle for longest, but it has a key


def test_a_stranger_that_is_still_sending_a_head_gives_way(keyed: RunningRouter) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(closing(connect(keyed))).sendall(b"GET /health HTT")
        keyed.wait_for(lambda: keyed.connections() == LIMITS.connections, "all are open")
        for _ in range(20):
            other = stack.enter_context(closing(connect(keyed)))
            other.sendall(models("secret-b"))
            assert read_answer(other)[0] == 200
        assert keyed.connections() == LIMITS.connections


def test_of_connections_with_keys_the_longest_idle_gives_way(keyed: RunningRouter) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(connect(keyed))) for _ in range(LIMITS.connections)]
        for connection in held:
            connection.sendall(models("secret-a"))
            assert read_answer(connection)[0] == 200
        other = stack.enter_context(closing(connect(keyed)))
        other.sendall(models("secret-b"))
        assert read_answer(other)[0] == 200
        assert [is_open(connection) for connection in held] == [False] + [True] * 5


def test_a_key_has_no_more_than_its_share_of_connections_with_requests(keyed: RunningRouter) -> None:
    """It holds them with bodies that do not end. Another key's requests go on."""
    begun = post(b" ", authorization="Bearer secret-a", content_length="5000")
    with ExitStack() as stack:
        held = [stack.enter_context(closing(connect(keyed))) for _ in range(3)]
        for connection in held:
            connection.sendall(begun)
        keyed.wait_for(lambda: keyed.server.http.busy.held == 3, "they are being read")  # type: ignore[union-attr]
        refused = stack.enter_context(closing(connect(keyed)))
        refused.sendall(begun)
        status, headers, body = read_answer(refused)
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")
        assert "3 of 6 connections" in body["error"]["message"]
        for _ in range(LIMITS.connections):
            other = stack.enter_context(closing(connect(keyed)))
            other.sendall(models("secret-b"))
            assert read_answer(other)[0] == 200
        assert all(is_open(connection) for connection in held)


def test_a_key_whose_requests_are_refused_does_not_keep_the_rest_of_the_connections(keyed: RunningRouter) -> None:
    begun = post(b" ", authorization="Bearer secret-a", content_length="5000")
    with ExitStack() as stack:
        new = stack.enter_context(closing(connect(keyed)))  # a client that has not sent its header yet
        keyed.wait_for(lambda: keyed.connections() == 1, "it is there")
        for index in range(12):
            connection = stack.enter_context(closing(connect(keyed)))
            connection.sendall(begun)
            if index < 3:
                keyed.wait_for(
                    lambda n=index: keyed.server.http.busy.held == n + 1,  # type: ignore[union-attr]
                    "it is being read",
                )
            else:
                assert read_answer(connection)[0] == 503
        new.sendall(models("secret-b"))
        assert read_answer(new)[0] == 200


def test_when_all_connections_have_requests_a_new_one_is_refused(router: RunningRouter) -> None:
    router.client.close()
    router.wait_for(lambda: router.connections() == 0, "no connections")
    with ExitStack() as stack:
        for index in range(LIMITS.connections):
            stack.enter_context(closing(connect(router))).sendall(post(b" ", content_length="500"))
            router.wait_for(lambda n=index: router.server.services.bodies.held == n + 1, "it is being read")
        one_more = stack.enter_context(closing(connect(router)))
        status, headers, body = parse(read_to_end(one_more))
        assert status == 503
        assert headers["retry-after"]
        assert body["error"]["code"] == "overloaded"
    router.client = router.new_client()
    router.wait_for(lambda: router.connections() == 0, "settled")
