"""A router takes over the address of another one: no connection is refused or reset, and no answer is cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError
from tandem.http_server import door, serving
from tests.router.conftest import RunningRouter, StartRouter
from tests.waiting import until

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LEAVING_ACCEPTED_S", 0.1)
    monkeypatch.setattr(serving, "LEAVING_IDLE_S", 0.3)


def successor_of(first: RunningRouter, start_router: StartRouter, **settings: Any) -> RunningRouter:
    return start_router(prefill=0, decode=0, door=first.look(lambda: first.server.door), **settings).join(first)


def followed_by(first: RunningRouter, start_router: StartRouter, **settings: Any) -> RunningRouter:
    """Its successor, when it has left."""
    second = successor_of(first, start_router, **settings)
    assert first.call(first.server.leave(PATIENCE_S))
    return second


@contextmanager
def asking(router: RunningRouter) -> Iterator[list[str]]:
    """Two clients that ask all the time, one on a new connection each time. What went wrong is in the list in the end."""
    failures: list[str] = []
    answers: list[str] = []
    ending = threading.Event()
    expected = router.expected("the fox", 6, seed=3)

    def ask(keeps: bool) -> None:
        body = {"model": "fake", "prompt": "the fox", "max_tokens": 6, "seed": 3}
        client = router.new_client()
        while not ending.is_set():
            try:
                answer = client.post("/v1/completions", json=body)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                (answers if text == expected else failures).append(text)
            except httpx.HTTPError as error:
                failures.append(repr(error))
            if not keeps:
                client.close()
                client = router.new_client()
        client.close()

    threads = [threading.Thread(target=ask, args=(keeps,)) for keeps in (False, True)]
    for thread in threads:
        thread.start()
    yield failures
    ending.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers


def alone(router: RunningRouter, requests: int = 1) -> None:
    """So many more prompts are read by this one."""
    before = router.metric("tandem_request_success_total", finished_reason="length")
    router.wait_for(
        lambda: router.metric("tandem_request_success_total", finished_reason="length") >= before + requests,
        "it answers alone",
    )


def test_under_load_nothing_fails(start_router: StartRouter) -> None:
    first = start_router()
    with asking(first) as failures:
        second = followed_by(first, start_router)
        assert second.url == first.url
        alone(second)
    assert failures == []
    assert (first.connections(), first.idle()) == (0, True)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("127.0.0.1", "::", False),
    ],
)
def test_at_another_address_nothing_fails_at_the_one_before(
    start_router: StartRouter, before: str, after: str, moves: bool
) -> None:
    first = start_router(host=before)
    port = free_port() if moves else first.client.base_url.port
    with asking(first) as failures:
        second = followed_by(first, start_router, host=after, port=port)
        assert (second.url != first.url, f":{port}" in second.url) == (True, True)
        alone(second, 20)
    assert failures == []
    assert (first.connections(), first.idle()) == (0, True)
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        serving.listen(after, port)  # what both sockets allowed each other, no other is allowed


def test_the_address_before_is_given_up_after_a_while(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FORMER_ADDRESS_S", 0.2)
    first = start_router()
    second = followed_by(first, start_router, port=free_port())

    def is_refused() -> bool:
        try:
            with first.new_client() as client:
                client.get("/health")
        except httpx.ConnectError:
            return True
        except httpx.ReadError:  # it was accepted in the moment in which the address was given up
            pass
        return False

    until(is_refused)
    assert second.complete(max_tokens=3).status_code == 200


def test_a_move_that_is_taken_back_at_once_finds_the_address_before_free(start_router: StartRouter) -> None:
    first = start_router()
    port = first.client.base_url.port
    with asking(first) as failures:
        third = followed_by(followed_by(first, start_router, port=free_port()), start_router, port=port)
        assert third.url == first.url
        assert third.complete(max_tokens=3).status_code == 200
    assert failures == []


def test_who_knows_the_address_from_two_moves_ago_is_answered_too(start_router: StartRouter) -> None:
    first = start_router()
    with asking(first) as failures:
        second = followed_by(first, start_router, port=free_port())
        third = followed_by(second, start_router, port=free_port())
        alone(third)
    assert failures == []
    assert len({first.url, second.url, third.url}) == 3


def test_an_address_that_is_taken_is_said_and_the_router_before_serves_on(start_router: StartRouter) -> None:
    first, other = start_router(), start_router()
    with pytest.raises(ConfigurationError, match="choose another port"):
        successor_of(first, start_router, port=other.client.base_url.port)
    assert first.complete(max_tokens=3).status_code == 200


def test_a_stream_goes_on_in_the_router_that_leaves(start_router: StartRouter) -> None:
    first = start_router()
    first.set(pause_at=20)
    with first.stream(max_tokens=40, seed=3) as stream:
        assert stream.read_header() == 200
        second = successor_of(first, start_router)
        leaving = first.begin(first.server.leave(PATIENCE_S))
        begun = stream.text(5)
        assert not leaving.done(), "it has a stream"
        first.set(pause_at=None)
        assert begun + stream.text() == first.expected("the fox", 40, seed=3)
    assert leaving.result(PATIENCE_S)
    assert second.complete(max_tokens=3).status_code == 200


def test_one_that_leaves_before_it_knows_its_nodes_takes_no_connection(start_router: StartRouter) -> None:
    first = start_router()
    second = start_router(prefill=0, decode=0, door=first.look(lambda: first.server.door))
    assert not second.look(lambda: second.server.accepts), "it has been told of no node"
    assert second.call(second.server.leave(PATIENCE_S))
    second.join(first)
    for _ in range(5):
        with first.new_client() as client:
            assert client.post("/v1/completions", json={"prompt": "the fox", "max_tokens": 2}).status_code == 200
    assert not second.look(lambda: second.server.accepts)
    assert second.connections() == 0


def test_a_router_whose_predecessor_is_gone_has_a_socket_of_its_own(start_router: StartRouter) -> None:
    gone = start_router()
    name = gone.look(lambda: gone.server.door)
    gone.call(gone.server.stop())
    assert door.take_listeners(name) == []
    alone = start_router(door=name)
    assert alone.complete(max_tokens=3).status_code == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_process_gets_no_socket(start_router: StartRouter) -> None:
    first = start_router()
    name = first.look(lambda: first.server.door)
    ask = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect('\\0' + sys.argv[1])\n"
        "print(len(socket.recv_fds(s, 1, 1)[1]))"
    )
    found = subprocess.run([sys.executable, "-c", ask, name], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "0"
