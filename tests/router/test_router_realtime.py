"""/v1/realtime: events in and out, prompts that are read ahead, ends in every phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    RejectConnection,
)

from tandem.router.config import ApiKey, Limits, Timeouts, TracingConfig
from tandem.wire.nodes import Role
from tests.realtime_client import RealtimeClient
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.event_reader import EventReader

LONG = "the quick brown fox jumps over the lazy dog and goes on. " * 12


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    return start_router()


@pytest.fixture
def client(router: RunningRouter) -> Iterator[RealtimeClient]:
    with closing(RealtimeClient(router.url)) as made:
        assert isinstance(made.opened, AcceptConnection)
        made.hear("session.created")
        yield made


def test_an_answer_is_that_of_the_chat(router: RunningRouter, client: RealtimeClient) -> None:
    client.say("input_text_buffer.append", text="h")
    client.say("input_text_buffer.append", text="i")
    client.say("input_text_buffer.commit")
    client.say("response.create", response={"seed": 3, "max_output_tokens": 5, "temperature": 1.0})
    done = client.hear("response.output_text.done")
    chat = router.chat("hi", seed=3, max_tokens=5, temperature=1.0).json()
    assert done["text"] == chat["choices"][0]["message"]["content"]
    assert client.hear("response.done")["response"]["usage"]["output_tokens"] == 5


def test_a_prompt_is_read_on_the_prefill_node_while_it_arrives(
    router: RunningRouter, client: RealtimeClient
) -> None:
    prefill = next(node for node in router.nodes.values() if node.role == "prefill")
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


@pytest.mark.parametrize("prefills", [1, 2])
def test_a_prefill_node_that_dies_between_two_parts_changes_no_answer(
    start_router: StartRouter, prefills: int
) -> None:
    router = start_router(prefill=prefills)
    with closing(RealtimeClient(router.url)) as client:
        client.say("input_text_buffer.append", text=LONG)
        readers = [node for node in router.nodes.values() if node.role == "prefill"]
        router.wait_for(lambda: any(node.submits for node in readers), "the beginning of the prompt")
        reader = next(node for node in readers if node.submits)
        router.remove(reader.info.node_id).kill()
        client.say("input_text_buffer.append", text=LONG)
        client.say("input_text_buffer.commit")
        client.say("response.create", response={"max_output_tokens": 4, "seed": 3})
        text = client.hear("response.output_text.done")["text"]
    chat = router.chat(LONG + LONG, seed=3, max_tokens=4).json()
    assert text == chat["choices"][0]["message"]["content"]


def test_a_client_that_takes_nothing_is_cut_off(start_router: StartRouter) -> None:
    router = start_router(
        prefill=0, decode=1, timeouts=Timeouts(slow_reader=0.2), limits=Limits(inflight_per_node=8)
    )
    router.remove("d0").kill()
    node = router.add("d0", Role.DECODE, max_model_len=400_000)
    router.wait_ready()
    with closing(RealtimeClient(router.url, receive_buffer=4096)) as client:
        item = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        client.say("conversation.item.create", item=item)
        client.say("response.create", response={"max_output_tokens": 300_000})
        node.wait_until(lambda: bool(node.submits), "it runs")
        router.wait_for(
            lambda: router.server.services.metrics.slow_readers_cut._value.get() == 1, "cut off", 60
        )
        router.wait_for(router.idle, "nothing is left of it")
        node.wait_until(lambda: not node._running, "cancelled")


def test_each_answer_has_a_trace_under_its_own_id(start_router: StartRouter) -> None:
    router = start_router(tracing=TracingConfig(sample=1.0))
    traces = router.server.services.traces
    with closing(RealtimeClient(router.url)) as client:
        for text in ("one", "two"):
            item = {"role": "user", "content": [{"type": "input_text", "text": text}]}
            client.say("conversation.item.create", item=item)
            client.say("response.create", response={"max_output_tokens": 3})
            name = client.hear("response.done")["response"]["id"]
            router.wait_for(
                lambda name=name: (found := traces.find(name)) is not None and not found.missing,
                "the nodes' parts",
            )
            told = router.client.get(f"/traces/{name}").json()
            assert (told["route"], told["status"], told["output_tokens"]) == ("/v1/realtime", 200, 3)
            assert {part["role"] for part in told["nodes"]} == {"prefill", "decode"}


@pytest.mark.parametrize("how", ["event", "gone"])
def test_an_answer_that_is_cancelled_ends_on_the_nodes(
    router: RunningRouter, client: RealtimeClient, how: str
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
def test_events_that_are_refused_say_why(client: RealtimeClient, event: dict[str, Any]) -> None:
    client.say(event.pop("type"), event_id="mine", **event)
    error = client.hear("error")["error"]
    assert error["event_id"] == "mine"
    assert error["message"]
    client.say("session.update", session={"instructions": "be brief"})
    assert client.hear("session.updated")["session"]["instructions"] == "be brief"


def test_what_is_no_upgrade_is_told_so(router: RunningRouter) -> None:
    assert router.client.get("/v1/realtime").status_code == 426


def test_pages_of_other_sites_are_refused(router: RunningRouter) -> None:
    with closing(RealtimeClient(router.url, origin="http://elsewhere")) as other:
        assert isinstance(other.opened, RejectConnection)
        assert other.opened.status_code == 403


def test_a_client_that_closes_is_answered(client: RealtimeClient) -> None:
    client.send(CloseConnection(code=1000))
    assert isinstance(client.next_event(), CloseConnection)


def closed(client: RealtimeClient) -> int:
    while not isinstance(event := client.next_event(), CloseConnection):
        pass
    return event.code


def test_an_event_that_is_too_large_ends_it(start_router: StartRouter) -> None:
    with closing(RealtimeClient(start_router(limits=Limits(body_bytes=2000)).url)) as client:
        client.say("input_text_buffer.append", text="x" * 3000)
        assert closed(client) == 1009


def test_a_client_that_says_nothing_is_cut_off(start_router: StartRouter) -> None:
    timeouts = Timeouts(realtime_ping=0.1, realtime_idle=0.1)
    with closing(RealtimeClient(start_router(timeouts=timeouts).url)) as client:
        assert closed(client) == 1008


def test_a_router_that_stops_says_goodbye(router: RunningRouter, client: RealtimeClient) -> None:
    router.look(lambda: [connection.shutdown() for connection in router.server._http.connections])  # type: ignore[union-attr]
    assert closed(client) == 1001


def test_a_key_is_asked_for_and_its_quota_holds(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("a", "secret", concurrent_requests=1),))
    with closing(RealtimeClient(router.url)) as stranger:
        assert isinstance(stranger.opened, RejectConnection)
        assert stranger.opened.status_code == 401
    for node in router.nodes.values():
        node.set(pause_at=1)
    stream = {"model": "fake", "prompt": "x", "max_tokens": 3, "stream": True}
    bearer = {"authorization": "Bearer secret"}
    other = EventReader(router.url, "/v1/completions", stream, headers=bearer)
    assert other.read_header() == 200
    with closing(RealtimeClient(router.url, **bearer)) as client:
        client.hear("session.created")
        client.say("input_text_buffer.append", text="hi")
        client.say("input_text_buffer.commit")
        client.say("response.create", response={"max_output_tokens": 3})
        refused = client.hear("response.done")["response"]
        assert refused["status"] == "failed"
        assert refused["status_details"]["error"]["code"] == "rate_limit_exceeded"
        for node in router.nodes.values():
            node.resume()
        other.text()
        client.say("response.create", response={"max_output_tokens": 3})
        assert client.hear("response.done")["response"]["status"] == "incomplete"


def test_frames_that_are_none_end_it(router: RunningRouter) -> None:
    with closing(RealtimeClient(router.url)) as client:
        client.hear("session.created")
        client.send_bytes(b"\xff\xff not a frame")
        while not isinstance(event := client.next_event(), CloseConnection):
            pass
        assert event.code == 1002
    assert router.client.get("/health").status_code == 200
