"""/v1/realtime: events in and out, prompts that are read ahead, ends in every phase."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import AcceptConnection, CloseConnection, Ping, Pong, RejectConnection, TextMessage

from tandem.api.openai.answer import PIECE_TOKENS
from tandem.api.realtime import events
from tandem.api.text.tokenizer import Tokenizer
from tandem.http_server.turns import PASS_S, Turns
from tandem.http_server.websocket import READ_FRAMES, WebSocket
from tandem.router.config import ApiKey, Limits, Timeouts, TracingConfig
from tandem.router.http.body import KeptMemory
from tandem.wire.sampling import FinishReason
from tests.realtime_client import RealtimeClient
from tests.router.conftest import RunningRouter, StartRouter, bearer

LONG = "the quick brown fox jumps over the lazy dog and goes on. " * 12
HI = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}


@pytest.fixture
def client(router: RunningRouter) -> Iterator[RealtimeClient]:
    with closing(RealtimeClient(router.url)) as made:
        assert isinstance(made.opened, AcceptConnection)
        made.hear("session.created")
        yield made


def ask(client: RealtimeClient, *texts: str, **response: Any) -> None:
    """Says these pieces of a text, if any, and asks for a response."""
    for text in texts:
        client.say("input_text_buffer.append", text=text)
    if texts:
        client.say("input_text_buffer.commit")
    client.say("response.create", response=response)


def is_read_ahead(router: RunningRouter) -> None:
    readers = [node for node in router.nodes.values() if node.role == "prefill"]
    router.wait_for(lambda: any(node.submits for node in readers), "the beginning of the prompt")


def test_an_answer_is_that_of_the_chat(router: RunningRouter, client: RealtimeClient) -> None:
    ask(client, "h", "i", seed=3, max_output_tokens=5, temperature=1.0)
    done = client.hear("response.output_text.done")
    chat = router.chat("hi", seed=3, max_tokens=5, temperature=1.0).json()
    assert done["text"] == chat["choices"][0]["message"]["content"]
    assert client.hear("response.done")["response"]["usage"]["output_tokens"] == 5


def test_a_prompt_is_read_on_the_prefill_node_while_it_arrives(router: RunningRouter, client: RealtimeClient) -> None:
    client.say("input_text_buffer.append", text=LONG)
    is_read_ahead(router)
    ahead = router.nodes["p0"].submits[0]
    assert (ahead.transfer, ahead.sampling.max_tokens) == (None, 1)
    client.say("input_text_buffer.commit")
    ask(client, max_output_tokens=3)
    client.hear("response.done")
    whole = next(submit for submit in router.nodes["p0"].submits if submit.transfer is not None)
    assert whole.prompt_token_ids[: len(ahead.prompt_token_ids)] == ahead.prompt_token_ids


def test_tokens_without_text_hide_none_behind_them(start_router: StartRouter, tokenizer: Tokenizer) -> None:
    router = start_router(prefill=0)
    node = router.nodes["d0"]
    node.set(pause_at=0)
    silent, said = tokenizer.encode("<|start|>", special=False), tokenizer.encode("fox", special=False)
    with closing(RealtimeClient(router.url)) as client:
        ask(client, "hi", max_output_tokens=1000)
        node.wait_until(lambda: bool(node.submits), "it runs")
        node.say(node.submits[0], 0, [*silent * (2 * PIECE_TOKENS), *said], FinishReason.STOP)
        assert client.hear("response.output_text.done")["text"] == "fox"


@pytest.mark.parametrize("prefills", [1, 2])
def test_a_prefill_node_that_dies_between_two_parts_changes_no_answer(start_router: StartRouter, prefills: int) -> None:
    router = start_router(prefill=prefills)
    with closing(RealtimeClient(router.url)) as client:
        client.say("input_text_buffer.append", text=LONG)
        is_read_ahead(router)
        reader = next(node for node in router.nodes.values() if node.submits)
        router.remove(reader.info.node_id).kill()
        ask(client, LONG, max_output_tokens=4, seed=3)
        text = client.hear("response.output_text.done")["text"]
    chat = router.chat(LONG + LONG, seed=3, max_tokens=4).json()
    assert text == chat["choices"][0]["message"]["content"]


def test_a_client_that_takes_nothing_is_cut_off(start_router: StartRouter) -> None:
    context = {"max_model_len": 400_000}
    router = start_router(prefill=0, node=context, timeouts=Timeouts(slow_reader=0.2)).with_small_buffers()
    node = router.nodes["d0"]
    with closing(RealtimeClient(router.url, receive_buffer=4096)) as client:
        ask(client, "hi", max_output_tokens=300_000)
        node.wait_until(lambda: bool(node.submits), "it runs")
        router.wait_for(router.idle, "cut off, and nothing is left of it", 25)
        assert router.metric("tandem_slow_readers_cut_total") == 1
        node.wait_until(lambda: not node.running, "cancelled")


def test_each_answer_has_a_trace_under_its_own_id(start_router: StartRouter) -> None:
    tracing = pytest.importorskip("tandem.router.tracing.wing")
    router = start_router(tracing=TracingConfig(sample=1.0))
    traces = router.wing(tracing.TraceWing).traces
    with closing(RealtimeClient(router.url)) as client:
        for text in ("one", "two"):
            ask(client, text, max_output_tokens=3)
            name = client.hear("response.done")["response"]["id"]
            router.wait_for(
                lambda name=name: (found := traces.find(name)) is not None and not found.missing, "the nodes' parts"
            )
            told = router.client.get(f"/traces/{name}").json()
            assert (told["route"], told["status"], told["output_tokens"]) == ("/v1/realtime", 200, 3)
            assert {part["role"] for part in told["nodes"]} == {"prefill", "decode"}


@pytest.mark.parametrize("how", ["event", "gone"])
def test_an_answer_that_is_cancelled_ends_on_the_nodes(router: RunningRouter, client: RealtimeClient, how: str) -> None:
    router.set(pause_at=2)
    ask(client, "hi", max_output_tokens=50)
    client.hear("response.output_text.delta")
    if how == "event":
        client.say("response.cancel")
        assert client.hear("response.done")["response"]["status"] == "cancelled"
    else:
        client.close()
    router.wait_for(lambda: router.server.services.dispatcher.running == 0, "its end")


def _events(*kinds: str) -> bytes:
    """Frames that arrive together."""
    frames = Connection(ConnectionType.CLIENT)
    return b"".join(frames.send(TextMessage(data=f'{{"type": "{kind}"}}')) for kind in kinds)


def test_an_answer_that_is_cancelled_at_once_begins_and_ends(client: RealtimeClient) -> None:
    client.say("conversation.item.create", item=HI)
    client.send_bytes(_events("response.create", "response.cancel"))
    begun = client.hear("response.created")["response"]["id"]
    done = client.hear("response.done")["response"]
    assert (done["id"], done["status"]) == (begun, "cancelled")


def test_an_answer_that_is_cancelled_twice_ends_once(router: RunningRouter, client: RealtimeClient) -> None:
    router.set(pause_at=1)
    ask(client, "hi")
    client.hear("response.output_item.added")
    client.send_bytes(_events("response.cancel", "response.cancel"))
    assert client.hear("response.done")["response"]["status"] == "cancelled"


def test_another_answer_than_the_one_that_is_named_is_not_cancelled(
    router: RunningRouter, client: RealtimeClient
) -> None:
    router.set(pause_at=1)
    ask(client, "hi", max_output_tokens=3)
    client.hear("response.output_item.added")
    client.say("response.cancel", response_id="resp_before")
    with pytest.raises(AssertionError, match="resp_before"):
        client.hear("response.done")
    router.set(pause_at=None)
    assert client.hear("response.done")["response"]["status"] == "incomplete"


def test_events_that_are_refused_say_why(client: RealtimeClient) -> None:
    for event in (
        {"type": "nonsense"},
        {"type": "response.create"},
        {"type": "response.cancel"},
        {"type": "input_text_buffer.commit"},
        {"type": "session.update", "session": {"model": "other"}},
        {"type": "conversation.item.create", "item": {"role": "user", "content": []}},
        {"type": "response.create", "response": {"tools": []}},
    ):
        client.say(**{"kind" if name == "type" else name: value for name, value in event.items()}, event_id="mine")  # type: ignore[arg-type]
        error = client.hear("error")["error"]
        assert (error["event_id"], bool(error["message"])) == ("mine", True), event
    client.say("session.update", session={"instructions": "be brief"})
    assert client.hear("session.updated")["session"]["instructions"] == "be brief"


def test_large_events_come_and_go_whole(client: RealtimeClient) -> None:
    text = "äb" * 200_000
    client.say("session.update", session={"instructions": text})
    assert client.hear("session.updated")["session"]["instructions"] == text


def test_who_is_let_in(router: RunningRouter) -> None:
    assert router.client.get("/v1/realtime").status_code == 426
    with closing(RealtimeClient(router.url, origin="http://elsewhere")) as other:
        assert isinstance(other.opened, RejectConnection)
        assert other.opened.status_code == 403, "pages of other sites are refused"


def closed(client: RealtimeClient) -> int:
    while not isinstance(event := client.next_event(), CloseConnection):
        pass
    return event.code


def test_text_that_is_dropped_takes_no_room(start_router: StartRouter) -> None:
    router = start_router(limits=Limits(body_bytes=2000))
    item = {"role": "user", "content": [{"type": "input_text", "text": "x" * 600}], "id": "mine"}
    with closing(RealtimeClient(router.url)) as client:
        client.hear("session.created")
        client.say("conversation.item.create", item=item)
        client.hear("conversation.item.done")
        for _ in range(4):
            client.say("input_text_buffer.append", text="x" * 600)
            client.say("input_text_buffer.clear")
            client.hear("input_text_buffer.cleared")
            client.say("session.update", session={"instructions": "x" * 600})
            client.hear("session.updated")
            client.say("conversation.item.create", item=item)
            assert "'mine' is taken" in client.hear("error")["error"]["message"]
        client.say("input_text_buffer.append", text="x" * 900)
        assert "at most 2000 characters" in client.hear("error")["error"]["message"]


def test_each_end_has_its_code(start_router: StartRouter, router: RunningRouter, client: RealtimeClient) -> None:
    client.send(CloseConnection(code=1000))
    assert closed(client) == 1000
    with closing(RealtimeClient(router.url)) as other:
        other.hear("session.created")
        other.send_bytes(b"\xff\xff not a frame")
        assert closed(other) == 1002
    assert router.client.get("/health").status_code == 200
    strict = start_router(limits=Limits(body_bytes=2000), timeouts=Timeouts(realtime_ping=0.1, realtime_idle=0.1))
    with closing(RealtimeClient(strict.url)) as large:
        large.say("input_text_buffer.append", text="x" * 3000)
        assert closed(large) == 1009
    with closing(RealtimeClient(strict.url)) as silent:
        assert closed(silent) == 1008
    with closing(RealtimeClient(router.url)) as left:
        router.look(lambda: [connection.shutdown() for connection in router.server.http.connections])  # type: ignore[union-attr]
        assert closed(left) == 1001, "the router stops"


def test_a_key_is_asked_for_and_its_quota_holds(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("a", "secret", concurrent_requests=1),))
    tenant = router.server.services.keys.find(b"secret")
    assert tenant is not None
    with closing(RealtimeClient(router.url, **bearer("secret"))) as client:
        client.hear("session.created")
        for headers, status in (({}, 401), (bearer("secret"), 429)):
            with closing(RealtimeClient(router.url, **headers)) as refused:
                assert isinstance(refused.opened, RejectConnection)
                assert refused.opened.status_code == status
        assert router.ask("/v1/completions", "secret", prompt="x").status_code == 429
        # Its answers, and what it reads ahead, are made in its own place.
        client.say("input_text_buffer.append", text=LONG)
        is_read_ahead(router)
        client.say("input_text_buffer.commit")
        ask(client, max_output_tokens=3)
        assert client.hear("response.done")["response"]["status"] == "incomplete"
        assert tenant.running == 1
    router.wait_for(lambda: tenant.running == 0, "its end")
    assert router.ask("/v1/completions", "secret", prompt="x", max_tokens=2).status_code == 200


def test_an_answer_that_a_quota_refuses_is_counted_as_elsewhere(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("a", "secret", requests_per_minute=2),))
    with closing(RealtimeClient(router.url, authorization="Bearer secret")) as client:
        for status in ("incomplete", "failed"):
            ask(client, "x", max_output_tokens=3)
            assert client.hear("response.done")["response"]["status"] == status
    assert router.metric("tandem_requests_refused_total", reason="quota") == 1


def test_a_conversation_has_a_limited_number_of_items(client: RealtimeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little text they have, each is looked at for every answer."""
    monkeypatch.setattr(events, "MOST_ITEMS", 3)
    item = {"role": "user", "content": [{"type": "input_text", "text": ""}]}
    for _ in range(3):
        client.say("conversation.item.create", item=item)
        client.hear("conversation.item.done")
    for kind, fields in (("conversation.item.create", {"item": item}), ("response.create", {})):
        client.say(kind, **fields)
        assert "at most 3 items" in client.hear("error")["error"]["message"]


def test_the_line_of_a_long_session_in_the_log_is_short(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router.access")
    with closing(RealtimeClient(router.url, **{"x-request-id": "long"})) as client:
        ask(client, "hi", max_output_tokens=1)
        for _ in range(40):
            client.hear("response.done")
            ask(client, max_output_tokens=1)
        client.hear("response.done")
    router.wait_for(lambda: "long GET /v1/realtime" in caplog.text, "its line")
    (line,) = [message for message in caplog.messages if "long GET /v1/realtime" in message]
    assert len(line) < 3000


def test_sessions_of_a_key_take_no_room_from_other_keys(start_router: StartRouter) -> None:
    limits = Limits(kept_bytes=2 << 20, body_bytes=400_000, body_bytes_at_once=400_000)
    router = start_router(api_keys=(ApiKey("greedy", "secret-g"), ApiKey("other", "secret-o")), limits=limits)
    sessions = [RealtimeClient(router.url, authorization="Bearer secret-g") for _ in range(4)]
    refused = []
    for session in sessions:
        session.hear("session.created")
        session.say("session.update", session={"instructions": "a" * 300_000})
        try:
            session.hear("session.updated")
        except AssertionError as error:
            refused.append(str(error))
    assert refused  # its own limit is reached
    assert router.server.services.bodies.held == 0
    with closing(RealtimeClient(router.url, authorization="Bearer secret-o")) as client:
        client.hear("session.created")
        client.say("session.update", session={"instructions": "a" * 300_000})
        client.hear("session.updated")
    assert router.ask("/v1/completions", "secret-o", prompt="x", max_tokens=2).status_code == 200
    for session in sessions:
        session.close()
    router.wait_for(lambda: router.server.services.kept.held == 0, "given back")


class _Arrivals:
    """An exchange whose client sends the same thing each second."""

    headers: ClassVar[list[tuple[bytes, bytes]]] = []

    def __init__(self, sends: Callable[[], bytes]) -> None:
        self.now = 0.0
        self._sends = sends

    async def receive(self) -> dict[str, Any]:
        self.now += 1.0
        return {"type": "http.request", "body": self._sends(), "more_body": True}

    async def send(self, message: dict[str, Any]) -> None: ...


@contextmanager
def socket_of(exchange: _Arrivals, idle_s: float, turns: Turns) -> Iterator[WebSocket]:
    with KeptMemory(1 << 20, lambda: None).share(0, "") as share:
        yield WebSocket(
            exchange,  # type: ignore[arg-type]
            share,
            most_bytes=10_000,
            ping_s=20.0,
            idle_s=idle_s,
            turns=turns,
            clock=lambda: exchange.now,
        )


@pytest.mark.parametrize("what", ["pings", "pongs", "bytes of a frame", "frames of an event"])
def test_only_whole_events_keep_a_session(what: str) -> None:
    client = Connection(ConnectionType.CLIENT)
    letters = iter(Connection(ConnectionType.CLIENT).send(TextMessage(data="x" * 125)))
    sends: dict[str, Callable[[], bytes]] = {
        "pings": lambda: client.send(Ping()),
        "pongs": lambda: client.send(Pong()),
        "bytes of a frame": lambda: bytes([next(letters)]),
        "frames of an event": lambda: client.send(TextMessage(data="x", message_finished=False)),
    }
    exchange = _Arrivals(sends[what])
    with socket_of(exchange, 30.0, Turns()) as socket:
        assert asyncio.run(asyncio.wait_for(socket.receive(), 10)) is None
        assert 30 < exchange.now < 33


async def test_streams_go_on_while_a_client_sends_many_frames() -> None:
    exchange = _Arrivals(lambda: Connection(ConnectionType.CLIENT).send(Ping()) * 2_000)
    with socket_of(exchange, 0.5, Turns(clock=itertools.count(step=PASS_S / 4).__next__)) as socket:
        reading = asyncio.create_task(socket.receive())
        passes = 0
        while not reading.done():
            passes += 1
            await asyncio.sleep(0)
    assert passes > 2_000 / READ_FRAMES / 4 / 2
