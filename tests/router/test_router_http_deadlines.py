"""A client may leave its connection in any state, and the router ends every such connection in bounded time."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from tandem.router.config import Timeouts
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.raw_http import connect, post, read_answer, read_to_end

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
    router = start_router(prefill=0, decode=0, timeouts=timeouts).with_small_buffers()
    router.add("d", Role.DECODE, max_model_len=1_000_000)
    router.wait_ready()
    return router


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
