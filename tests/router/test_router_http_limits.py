"""What never becomes a request: headers and bodies that are too large, too slow, or not HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tandem.router.config import ApiKey, Limits, Timeouts
from tests.loops import PATIENCE_S
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.raw_http import connect, parse, post, read_answer, read_to_end, talk

LIMITS = Limits(header_bytes=4096, body_bytes=10_000, connections=6)
KEYS = (ApiKey("a", "secret-a"), ApiKey("b", "secret-b"))
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BEGUN = post(b" ", authorization="Bearer secret-a", content_length="5000")


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    return keep_router(limits=LIMITS)


@pytest.fixture
def impatient(start_router: StartRouter) -> Iterator[RunningRouter]:
    running = start_router(limits=LIMITS, timeouts=Timeouts(header=0.3, body=0.3, keep_alive=30))
    yield running
    assert running.complete(max_tokens=2).status_code == 200


def test_what_is_too_large_or_not_http(router: RunningRouter) -> None:
    for size in (4500, 60_000, 200_000):
        status, headers, body = talk(router, post(b"", x_big="a" * size, content_length="0"))
        assert (status, headers["connection"]) == (431, "close")
        assert body["error"]["code"] == "header_too_large"
    assert talk(router, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 431
    for data in (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4 + b"\r\n\r\n",
    ):
        status, headers, body = talk(router, data)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert set(body["error"]) == {"message", "type", "param", "code"}
    asked = {"content-type": "application/json"}
    # By its own account, and in chunks.
    for content in (b"x" * 20_000, (b" " * 1000 for _ in range(30))):
        answer = router.client.post("/v1/completions", content=content, headers=asked)
        assert error_of(answer, 413)["code"] == "request_too_large"
    assert router.complete(max_tokens=2).status_code == 200  # it still answers


def test_a_header_or_body_that_never_ends(impatient: RunningRouter) -> None:
    status, headers, body = talk(impatient, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
    assert (status, headers["connection"], body["error"]["type"]) == (408, "close", "invalid_request_error")
    status, headers, body = talk(impatient, post(b'{"model": ', content_length="500"))
    assert (status, headers["connection"]) == (408, "close")
    assert "within 0.3 s" in body["error"]["message"]
    with closing(connect(impatient)) as connection:  # the second header on a connection is timed too
        connection.sendall(HEALTH)
        assert read_answer(connection)[0] == 200
        connection.sendall(b"GET /health HTT")
        assert parse(read_to_end(connection))[0] == 408
    with closing(connect(impatient)) as connection:
        assert read_to_end(connection) == b"", "one that never says anything is closed"


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
        connection.settimeout(PATIENCE_S)


class Crowd:
    """Clients of a router with keys, which has places for six connections."""

    def __init__(self, router: RunningRouter, stack: ExitStack) -> None:
        self.router = router
        self._stack = stack

    def comes(self, says: bytes, status: int | None = None) -> socket.socket:
        """A new connection that says this, and reads its answer if it is to have this status."""
        connection = self._stack.enter_context(closing(connect(self.router)))
        connection.sendall(says)
        if status is not None:
            assert read_answer(connection)[0] == status
        return connection

    def are_read(self, count: int) -> None:
        self.router.wait_for(lambda: self.router.server.http.busy.held == count, f"{count} are being read")  # type: ignore[union-attr]


@pytest.fixture
def crowd(start_router: StartRouter) -> Iterator[Crowd]:
    running = start_router(limits=LIMITS, api_keys=KEYS, timeouts=Timeouts(header=30, body=30))
    with ExitStack() as stack:
        yield Crowd(running, stack)
    running.wait_for(lambda: running.connections() == 0, "all are gone")


def test_an_idle_stranger_gives_way_and_the_longest_idle_first(crowd: Crowd) -> None:
    with_key = crowd.comes(models("secret-a"), 200)
    strangers = [crowd.comes(HEALTH, 200) for _ in range(LIMITS.connections - 1)]
    crowd.comes(models("secret-b"), 200)
    assert [is_open(stranger) for stranger in strangers] == [False] + [True] * 4
    assert is_open(with_key)  # idle for longest, but it has a key


def test_a_stranger_that_is_still_sending_a_head_gives_way(crowd: Crowd) -> None:
    for _ in range(LIMITS.connections):
        crowd.comes(b"GET /health HTT")
    crowd.router.wait_for(lambda: crowd.router.connections() == LIMITS.connections, "all are open")
    for _ in range(20):
        crowd.comes(models("secret-b"), 200)
    assert crowd.router.connections() == LIMITS.connections


def test_of_connections_with_keys_the_longest_idle_gives_way(crowd: Crowd) -> None:
    held = [crowd.comes(models("secret-a"), 200) for _ in range(LIMITS.connections)]
    crowd.comes(models("secret-b"), 200)
    assert [is_open(connection) for connection in held] == [False] + [True] * 5


def test_a_key_has_no_more_than_its_share_of_connections_with_requests(crowd: Crowd) -> None:
    """It holds them with bodies that do not end. Another key's requests go on."""
    held = [crowd.comes(BEGUN) for _ in range(3)]
    crowd.are_read(3)
    status, headers, body = read_answer(crowd.comes(BEGUN))
    assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")
    assert "3 of 6 connections" in body["error"]["message"]
    for _ in range(LIMITS.connections):
        crowd.comes(models("secret-b"), 200)
    assert all(is_open(connection) for connection in held)


def test_a_key_whose_requests_are_refused_does_not_keep_the_rest_of_the_connections(crowd: Crowd) -> None:
    new = crowd.comes(b"")  # a client that has not sent its header yet
    crowd.router.wait_for(lambda: crowd.router.connections() == 1, "it is there")
    for index in range(3):
        crowd.comes(BEGUN)
        crowd.are_read(index + 1)
    for _ in range(9):
        crowd.comes(BEGUN, 503)
    new.sendall(models("secret-b"))
    assert read_answer(new)[0] == 200


def test_when_all_connections_have_requests_a_new_one_is_refused(start_router: StartRouter) -> None:
    router = start_router(limits=LIMITS)
    with ExitStack() as stack:
        for index in range(LIMITS.connections):
            stack.enter_context(closing(connect(router))).sendall(post(b" ", content_length="500"))
            router.wait_for(lambda n=index: router.server.services.bodies.held == n + 1, "it is being read")
        one_more = stack.enter_context(closing(connect(router)))
        status, headers, body = parse(read_to_end(one_more))
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert headers["retry-after"]
