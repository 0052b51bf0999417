"""/v1/realtime: events in and out, prompts that are read ahead, ends in every phase."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    RejectConnection,
    Request,
    TextMessage,
)

from tandem.router.config import Limits, Timeouts
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.raw_http import connect

LONG = "the quick brown fox jumps over the lazy dog and goes on. " * 12


class Client:
    def __init__(self, router: RunningRouter, **headers: str) -> None:
        self._socket = connect(router)
        self._frames = WSConnection(ConnectionType.CLIENT)
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = Request(host="x", target="/v1/realtime", extra_headers=extra)
        self._socket.sendall(self._frames.send(request))
        self._events: list[Event] = []
        self.opened = self.next_event()

    def next_event(self) -> Event:
        while not self._events:
            data = self._socket.recv(65536)
            self._frames.receive_data(data or None)
            self._events = list(self._frames.events())
        return self._events.pop(0)

    def say(self, kind: str, **fields: Any) -> None:
        self.send(TextMessage(data=json.dumps({"type": kind, **fields})))

    def send(self, event: TextMessage | CloseConnection) -> None:
        self._socket.sendall(self._frames.send(event))

    def hear(self, kind: str) -> dict[str, Any]:
        """The next event of that type; an error ends the wait."""
        text = ""
        while True:
            event = self.next_event()
            assert isinstance(event, TextMessage), event
            text += event.data
            if event.message_finished:
                found: dict[str, Any] = json.loads(text)
                text = ""
                if found["type"] == kind:
                    return found
                assert found["type"] != "error", found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    return start_router()


@pytest.fixture
def client(router: RunningRouter) -> Iterator[Client]:
    with closing(Client(router)) as made:
        assert isinstance(made.opened, AcceptConnection)
        made.hear("session.created")
        yield made


def test_an_answer_is_that_of_the_chat(router: RunningRouter, client: Client) -> None:
    client.say("input_text_buffer.append", text="h")
    client.say("input_text_buffer.append", text="i")
    client.say("input_text_buffer.commit")
    client.say("response.create", response={"seed": 3, "max_output_tokens": 5, "temperature": 1.0})
    done = client.hear("response.output_text.done")
    chat = router.chat("hi", seed=3, max_tokens=5, temperature=1.0).json()
    assert done["text"] == chat["choices"][0]["message"]["content"]
    assert client.hear("response.done")["response"]["usage"]["output_tokens"] == 5


def test_a_prompt_is_read_on_the_prefill_node_while_it_arrives(router: RunningRouter, client: Client) -> None:
    prefill = next(node for node in router.nodes.values() if node.role == "prefill")
    for _ in range(6):
        client.say("input_text_buffer.append", text=LONG)
    prefill.wait_until(lambda: bool(prefill.submits), "the beginning of the prompt")
    ahead = prefill.submits[0]
    assert ahead.transfer is None
    assert ahead.sampling.max_tokens == 1
    client.say("input_text_buffer.commit")
    client.say("response.create", response={"max_output_tokens": 3})
    client.hear("response.done")
    whole = next(submit for submit in prefill.submits if submit.transfer is not None)
    assert whole.prompt_token_ids[: len(ahead.prompt_token_ids)] == ahead.prompt_token_ids


@pytest.mark.parametrize("how", ["event", "gone"])
def test_an_answer_that_is_cancelled_ends_on_the_nodes(
    router: RunningRouter, client: Client, how: str
) -> None:
    for node in router.nodes.values():
        node.set(pause_at=2)
    client.say(
        "conversation.item.create", item={"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    )
    client.say("response.create", response={"max_output_tokens": 50})
    client.hear("response.output_text.delta")
    if how == "event":
        client.say("response.cancel")
        assert client.hear("response.done")["response"]["status"] == "cancelled"
    else:
        client.close()
    router.wait_for(lambda: router.server.services.dispatcher.running == 0, "its end")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "nonsense"},
        {"type": "response.create"},
        {"type": "response.cancel"},
        {"type": "input_text_buffer.commit"},
        {"type": "session.update", "session": {"model": "other"}},
        {"type": "conversation.item.create", "item": {"role": "user", "content": []}},
        {"type": "response.create", "response": {"tools": []}},
    ],
)
def test_events_that_are_refused_say_why(client: Client, event: dict[str, Any]) -> None:
    client.say(event.pop("type"), event_id="mine", **event)
    error = client.hear("error")["error"]
    assert error["event_id"] == "mine"
    assert error["message"]
    client.say("session.update", session={"instructions": "be brief"})
    assert client.hear("session.updated")["session"]["instructions"] == "be brief"


def test_what_is_no_upgrade_is_told_so(router: RunningRouter) -> None:
    assert router.client.get("/v1/realtime").status_code == 426


def test_pages_of_other_sites_are_refused(router: RunningRouter) -> None:
    with closing(Client(router, origin="http://elsewhere")) as other:
        assert isinstance(other.opened, RejectConnection)
        assert other.opened.status_code == 403


def test_a_client_that_closes_is_answered(client: Client) -> None:
    client.send(CloseConnection(code=1000))
    assert isinstance(client.next_event(), CloseConnection)


def closed(client: Client) -> int:
    while not isinstance(event := client.next_event(), CloseConnection):
        pass
    return event.code


def test_an_event_that_is_too_large_ends_it(start_router: StartRouter) -> None:
    with closing(Client(start_router(limits=Limits(body_bytes=2000)))) as client:
        client.say("input_text_buffer.append", text="x" * 3000)
        assert closed(client) == 1009


def test_a_client_that_says_nothing_is_cut_off(start_router: StartRouter) -> None:
    timeouts = Timeouts(realtime_ping=0.1, realtime_idle=0.1)
    with closing(Client(start_router(timeouts=timeouts))) as client:
        assert closed(client) == 1008


def test_a_router_that_stops_says_goodbye(router: RunningRouter, client: Client) -> None:
    router.look(lambda: [connection.shutdown() for connection in router.server._http.connections])  # type: ignore[union-attr]
    assert closed(client) == 1001
