"""All bodies together take bounded memory while they are read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tandem.base.errors import ConfigurationError
from tandem.base.shares import Shares
from tandem.router.config import ApiKey, Limits, RouterConfig, Timeouts
from tandem.router.http.body import BodyBudget
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.raw_http import connect, post, read_answer, read_to_end

LIMITS = Limits(body_bytes=10_000, body_bytes_at_once=25_000)
MOST = 9_900  # bytes sent of a body of 10,000


def held(router: RunningRouter) -> int:
    return router.server.services.bodies.held


def body(size: int) -> bytes:
    bare = json.dumps({"model": "fake", "prompt": "the fox", "max_tokens": 2}).encode()
    return bare + b" " * (size - len(bare))


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    return keep_router(limits=LIMITS, timeouts=Timeouts(body=5))


@pytest.fixture
def router(kept_router: RunningRouter) -> Iterator[RunningRouter]:
    yield kept_router.as_new()
    kept_router.wait_for(lambda: held(kept_router) == 0, "all of it is given back")
    assert kept_router.complete(max_tokens=2).status_code == 200


def begin(router: RunningRouter) -> socket.socket:
    """Sends a request with all of its body except the last bytes."""
    before = held(router)
    connection = connect(router)
    connection.sendall(post(body(10_000)[:MOST], content_length="10000"))
    router.wait_for(lambda: held(router) == before + MOST, "received")
    return connection


def test_what_is_beyond_it_is_refused_and_may_come_again(router: RunningRouter) -> None:
    first, second = begin(router), begin(router)
    refused = router.metric("tandem_requests_refused_total", reason="bodies")
    with closing(connect(router)) as third:
        for _ in range(2):  # on the same connection: what comes of a refused body is dropped
            third.sendall(post(body(9_000), content_length="9000"))
            status, headers, answer = read_answer(third)
            assert status == 503
            assert headers["retry-after"] == "1"
            assert answer["error"]["code"] == "overloaded"
            assert "25000 bytes" in answer["error"]["message"]
        assert router.metric("tandem_requests_refused_total", reason="bodies") == refused + 2
        assert router.complete(max_tokens=2).status_code == 200  # a small one fits beside them
        first.sendall(body(10_000)[MOST:])
        assert read_answer(first)[0] == 200
        third.sendall(post(body(9_000), content_length="9000"))
        assert read_answer(third)[0] == 200
    second.close()
    first.close()


def test_one_that_is_refused_in_the_middle_gives_back_what_it_had(router: RunningRouter) -> None:
    others = [begin(router), begin(router)]
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", transfer_encoding="chunked") + b"fa0\r\n" + b" " * 4000 + b"\r\n")
        router.wait_for(lambda: held(router) == 2 * MOST + 4000, "a part of it is there")
        connection.sendall(b"fa0\r\n" + b" " * 4000 + b"\r\n")
        assert read_answer(connection)[0] == 503
        assert held(router) == 2 * MOST
        connection.sendall(b"fa0\r\n" + b" " * 4000 + b"\r\n0\r\n\r\n" + post(body(200), content_length="200"))
        assert read_answer(connection)[0] == 200
    for other in others:
        other.close()


@pytest.mark.parametrize("rest", [None, body(10_000)[MOST:], b"}" * 100], ids=["hung up", "finished", "spoiled"])
def test_it_is_given_back_on_every_way_out(router: RunningRouter, rest: bytes | None) -> None:
    with closing(begin(router)) as connection:
        if rest is not None:
            connection.sendall(rest)
            assert read_answer(connection)[0] == (400 if rest.startswith(b"}") else 200)
            router.wait_for(lambda: held(router) == 0, "given back")
    router.wait_for(lambda: held(router) == 0, "given back")


def test_it_is_given_back_when_the_body_is_too_slow(start_router: StartRouter) -> None:
    router = start_router(limits=LIMITS, timeouts=Timeouts(body=0.3))
    with closing(begin(router)) as connection:
        assert b"408" in read_to_end(connection)
    assert held(router) == 0


def test_it_is_given_back_while_the_answer_is_still_being_written(router: RunningRouter) -> None:
    node = router.nodes["d0"]
    node.set(pause_at=1)
    with closing(connect(router)) as connection:
        connection.sendall(post(body(9_000), content_length="9000"))
        node.wait_until(lambda: bool(node.submits), "submitted")
        assert held(router) == 0
        node.resume()
        assert read_answer(connection)[0] == 200


def test_every_body_counts(router: RunningRouter) -> None:
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions"):
        with closing(connect(router)) as connection:
            connection.sendall(post(b" " * 5000, path, content_length="6000"))
            router.wait_for(lambda: held(router) == 5000, "received")
        router.wait_for(lambda: held(router) == 0, "given back")


def test_a_body_in_single_bytes_is_read_whole_and_so_is_one_that_is_dropped(router: RunningRouter) -> None:
    single = b"".join(b"1\r\n%c\r\n" % byte for byte in body(9_000)) + b"0\r\n\r\n"
    with closing(connect(router)) as connection:
        for path, status in (("/nothing", 404), ("/v1/completions", 200), ("/nothing", 404)):
            connection.sendall(post(single, path, transfer_encoding="chunked"))
            assert read_answer(connection)[0] == status


def test_a_key_leaves_room_for_other_keys(start_router: StartRouter) -> None:
    limits = Limits(body_bytes=10_000, body_bytes_at_once=50_000)
    keys = (ApiKey("greedy", "secret-g"), ApiKey("other", "secret-o"))
    router = start_router(limits=limits, timeouts=Timeouts(body=30), api_keys=keys)
    with ExitStack() as stack:

        def begin(key: str) -> socket.socket:
            connection = stack.enter_context(closing(connect(router)))
            head = {"authorization": f"Bearer {key}", "content_length": "10000"}
            connection.sendall(post(body(10_000)[:MOST], **head))
            return connection

        for number in (1, 2):
            begin("secret-g")
            router.wait_for(lambda n=number: held(router) == n * MOST, "received")
        status, _, answer = read_answer(begin("secret-g"))
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert "this key's part of 50000 bytes" in answer["error"]["message"]
        for _ in range(2):  # the largest body that there may be
            other = begin("secret-o")
            other.sendall(body(10_000)[MOST:])
            assert read_answer(other)[0] == 200


def test_beside_a_greedy_key_another_has_its_first_body_and_two_share() -> None:
    shares = Shares(100, alone=50)
    for _ in range(60):
        if shares.fits("greedy", 1):
            shares.take("greedy", 1)
    assert shares.of("greedy") == 50
    assert shares.fits("other", 50)
    for _ in range(60):
        if shares.fits("second", 1):
            shares.take("second", 1)
    assert shares.of("second") == 25
    assert shares.fits("third", 25)
    shares.take("greedy", -50)
    shares.take("second", -25)
    assert shares.held == 0
    assert shares.fits("", 100)


async def test_large_bodies_are_parsed_one_at_a_time_and_keys_take_turns() -> None:
    parsed, budget = list[str](), BodyBudget(Limits(), lambda: None)

    async def parse(owner: str) -> None:
        with budget.share() as share:
            share.take(owner, 1)
            async with share.parsing():
                parsed.append(owner)
                await asyncio.sleep(0)
                assert parsed[-1] == owner, "no other meanwhile"

    async with asyncio.TaskGroup() as group:
        for owner in ("greedy", "greedy", "greedy", "other"):
            group.create_task(parse(owner))
    assert parsed[:2] == ["greedy", "other"]


def test_a_budget_that_no_body_would_fit_into() -> None:
    with pytest.raises(ConfigurationError, match="body_bytes must be at most 99, which all bodies together"):
        RouterConfig(tokenizer_path="x", model_name="x", limits=Limits(body_bytes=100, body_bytes_at_once=99))
