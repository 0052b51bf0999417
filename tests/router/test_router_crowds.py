"""Many misbehaving clients at once: their cost is bounded, and all other answers are right."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import msgspec
import pytest

from tandem.router.config import Limits, Timeouts
from tandem.router.policy.views import RoutingDecision, RoutingRequest
from tandem.router.prefixes import PromptHashes
from tests.loops import PATIENCE_S
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.event_reader import EventReader

CROWD = 50
# The bytes that a connection may hold for a client that does not read: asyncio's high-water mark, and the events of one turn.
MOST_BUFFERED = 256 << 10


@pytest.fixture
def router(start_router: StartRouter) -> Iterator[RunningRouter]:
    running = start_router(
        prefill=0,
        node={"max_model_len": 100_000},
        limits=Limits(inflight_per_node=512, connections=512),
        timeouts=Timeouts(slow_reader=60, header=60),
    )
    yield running
    running.wait_for(running.idle, "nothing is left behind", 20)
    assert running.look(lambda: running.server.services.tasks.down) == {}


def answers_are_right(router: RunningRouter) -> None:
    def ask(seed: int) -> None:
        with router.stream(max_tokens=20, seed=seed) as events:
            assert events.text() == router.expected("the fox", 20, seed=seed)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(12)))


@pytest.mark.slow
def test_a_crowd_of_readers_that_stop_reading(router: RunningRouter) -> None:
    """They ask for far more than their connections hold, and the nodes have said all of it."""
    body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 120, "logprobs": 20}
    http = router.server.http
    assert http is not None
    router.with_small_buffers()

    def buffered() -> list[int]:
        return [connection.transport.get_write_buffer_size() for connection in http.connections]

    with ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(EventReader(router.url, "/v1/completions", body, receive_buffer=4096))
        answers_are_right(router)
        node = router.nodes["d0"]
        node.wait_until(lambda: len(node.submits) >= CROWD and not node.running, "all of it is generated", 60)
        held = router.look(buffered)
        assert sum(size > 0 for size in held) >= CROWD, "they are behind"
        assert max(held) < MOST_BUFFERED
        answers_are_right(router)


def test_a_crowd_that_sends_its_headers_slowly(router: RunningRouter) -> None:
    address = httpx.URL(router.url)
    with ExitStack() as stack:
        for _ in range(3 * CROWD):
            server = address.host, address.port or 80
            connection = stack.enter_context(socket.create_connection(server, timeout=PATIENCE_S))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        answers_are_right(router)


def test_however_long_the_reasons_of_many_choices_are_the_answer_is_sent(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reasons go into a header, which is cut; a header that ends in a space cannot be sent at all."""
    dispatcher = router.server.services.dispatcher
    choose = dispatcher.placement.choose

    def explain(routing: RoutingRequest, hashes: PromptHashes) -> RoutingDecision:
        decision = choose(routing, hashes)
        return msgspec.structs.replace(decision, reason="x" * 1023 + " and so on")

    monkeypatch.setattr(dispatcher.placement, "choose", explain)
    answer = router.complete(max_tokens=2)
    assert answer.status_code == 200
    assert answer.headers["x-tandem-decision"] == "x" * 1023
