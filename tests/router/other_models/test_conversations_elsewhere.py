"""A conversation of /v1/realtime with another deployment's model goes through to its router."""

from __future__ import annotations

from contextlib import closing

import pytest
from wsproto.events import CloseConnection, RejectConnection

from tests.realtime_client import RealtimeClient
from tests.router.conftest import RunningRouter
from tests.router.realtime.test_router_realtime import ask

pytest.importorskip("tandem.router.realtime")


def test_a_conversation_goes_to_the_model_that_its_address_names(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    with closing(RealtimeClient(front.url, query="?model=code")) as client:
        assert client.hear("session.created")["session"]["model"] == "code"
        ask(client, "h", "i", seed=3, max_output_tokens=5, temperature=1.0)
        said = client.hear("response.output_text.done")["text"]
        client.hear("response.done")
    chat = code.chat("hi", seed=3, max_tokens=5, temperature=1.0).json()
    assert said == chat["choices"][0]["message"]["content"]
    assert front.nodes["d0"].submits == []


def test_the_address_may_name_the_served_model_and_nothing_that_none_has(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, _ = two
    with closing(RealtimeClient(front.url, query="?model=fake")) as client:
        assert client.hear("session.created")["session"]["model"] == "fake"
        client.say("session.update", session={"type": "realtime", "model": "code"})
        with pytest.raises(AssertionError, match=r"connect with /v1/realtime\?model=code"):
            client.hear("session.updated")
    with closing(RealtimeClient(front.url, query="?model=none")) as client:
        assert isinstance(client.opened, RejectConnection)
        assert client.opened.status_code == 404
    answer = front.client.get("/v1/realtime?model=code")  # no WebSocket: its router says so
    assert answer.status_code == 426


def test_a_conversation_ends_with_the_client_with_the_other_router_and_with_this_one(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, code = two
    node = code.nodes["d0"]
    node.set(pause_at=2)
    with closing(RealtimeClient(front.url, query="?model=code")) as client:
        ask(client, "hi", max_output_tokens=50)
        node.wait_until(lambda: bool(node.submits), "the other router has sent it to a node")
    node.wait_until(lambda: bool(node.cancels), "its node hears that it is not wanted")
    with (
        closing(RealtimeClient(front.url, query="?model=code")) as stays,
        closing(RealtimeClient(front.url, query="?model=code")) as other,
    ):
        for client in (stays, other):
            client.hear("session.created")
        stays.send(CloseConnection(code=1000))
        assert isinstance(stays.next_event(), CloseConnection)
        front.call(front.server.stop())
        ended = other.next_event()
        assert isinstance(ended, CloseConnection)
        assert ended.code == 1001
    with closing(RealtimeClient(code.url)) as client:
        client.hear("session.created")  # it serves on


def test_a_conversation_hears_that_the_other_router_stops(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    with closing(RealtimeClient(front.url, query="?model=code")) as client:
        client.hear("session.created")
        code.call(code.server.stop())
        ended = client.next_event()
        assert isinstance(ended, CloseConnection)
        assert ended.code == 1001
