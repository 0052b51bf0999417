"""The load generator against a server whose bytes the test decides: what it measures, and how it reports each kind of failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import Api, ApiEndpoint, Prompt, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.timeline import Timeline
from tests.loadgen.fake_server import Exchange, FakeServer, answering, complete, serving

# Timers may be late, never early: what a delay was is known from below, and from above only roughly.
LATE_S = 2.0
Answer = Callable[[Exchange], Awaitable[None]]
# Steps of an answer.
BEGIN, TOKEN, END, LAST = ("begin",), ("token",), ("end",), ("write", b"0\r\n\r\n")


def ask(
    answer: Answer,
    *,
    times: int = 1,
    prompt: Prompt | list[dict[str, str]] = "The quick fox",
    shape: RequestShape | None = None,
    max_tokens: int = 3,
) -> tuple[list[Timeline], FakeServer]:
    """One request after another over one client."""

    async def run() -> tuple[list[Timeline], FakeServer]:
        timelines = []
        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            api = Api(http, shape or RequestShape("smol"))
            for _ in range(times):
                timeline = Timeline("test", max_tokens, prompt_tokens=99)
                await api.ask(prompt, timeline)
                timelines.append(timeline)
        return timelines, server

    return asyncio.run(run())


async def test_known_delays_are_what_is_measured() -> None:
    timeline = Timeline("test", max_tokens=3)

    async def received(chunks: int) -> None:
        """So that a delay begins where the one before it ended for the client too."""
        while len(timeline.chunk_times) < chunks:  # noqa: ASYNC110 (the timeline is under test, not its events)
            await asyncio.sleep(0)

    async def answer(exchange: Exchange) -> None:
        await asyncio.sleep(0.04)
        await exchange.begin()
        for chunks, delay in enumerate((0.0, 0.01, 0.03)):
            await received(chunks)
            await asyncio.sleep(delay)
            await exchange.token()
        await received(3)
        await exchange.usage(12, 3)
        await asyncio.sleep(0.02)  # after the last token: no request's latency
        await exchange.end()

    async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
        await Api(http, RequestShape("smol")).ask("hello", timeline)
    assert timeline.succeeded
    assert 0.04 <= timeline.ttft < 0.04 + LATE_S
    assert 0.01 <= timeline.inter_token[0] < 0.01 + LATE_S
    assert 0.03 <= timeline.inter_token[1] < 0.03 + LATE_S
    assert timeline.e2e == pytest.approx(timeline.ttft + sum(timeline.inter_token))
    assert timeline.ended_at - timeline.sent_at >= timeline.e2e + 0.02
    assert (timeline.prompt_tokens, timeline.output_tokens) == (12, 3)


def test_the_head_alone_is_no_token() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await asyncio.sleep(0.03)
        await exchange.token()
        await exchange.end()

    (timeline,), _ = ask(answer)
    assert timeline.ttft >= 0.03


def test_a_request_says_what_was_asked_and_nothing_else() -> None:
    _, server = ask(complete, prompt=(1, 2, 3), shape=RequestShape("smol", temperature=0.5), max_tokens=7)
    (exchange,) = server.requests
    assert (exchange.method, exchange.path) == ("POST", "/v1/completions")
    assert exchange.body == {
        "model": "smol", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "temperature": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_connection_is_used_again_and_one_that_the_server_has_closed_costs_no_request(hangs_up: bool) -> None:
    async def answer(exchange: Exchange) -> None:
        await complete(exchange)
        if hangs_up:
            await exchange.hang_up()

    timelines, server = ask(answer, times=3)
    assert all(timeline.succeeded for timeline in timelines)
    assert server.connections == (3 if hangs_up else 1)


def test_tokens_are_counted_as_the_server_says_and_else_every_chunk_is_taken_for_one() -> None:
    (timeline,), _ = ask(answering(BEGIN, TOKEN, TOKEN, END))
    assert timeline.output_tokens == 2
    assert timeline.prompt_tokens == 99  # what the workload meant
    (timeline,), _ = ask(answering(BEGIN, ("token", " one"), ("token", " two three four"), ("usage", 5, 4), END))
    assert len(timeline.inter_token) == 1, "one chunk"
    assert timeline.output_tokens == 4
    assert "".join(timeline.text) == " one two three four"


def test_a_chat_streams_opening_event_is_no_token() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.02)
        for word in ("Hi", " there"):
            await exchange.event({"choices": [{"index": 0, "delta": {"content": word}}]})
        await exchange.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await exchange.end()

    asked = [{"role": "user", "content": "hello"}]
    (timeline,), server = ask(answer, prompt=asked, shape=RequestShape("smol", endpoint=ApiEndpoint.CHAT))
    (exchange,) = server.requests
    assert exchange.path == "/v1/chat/completions"
    assert (exchange.body["messages"], exchange.body["max_completion_tokens"]) == (asked, 3)
    assert timeline.succeeded
    assert timeline.ttft >= 0.02
    assert "".join(timeline.text) == "Hi there"


# --- kinds of failure


@pytest.mark.parametrize(
    ("steps", "kind", "said"),
    [
        ([("respond", 503, {"error": {"message": "no worker", "type": "x", "code": "unavailable"}})], "http_503", "no worker"),
        ([("respond", 404, "not here")], "http_404", '"not here"'),
        ([BEGIN, TOKEN, ("event", {"error": {"message": "node lost", "code": "node_lost"}}), LAST], "stream_error", "node lost"),
        ([BEGIN, TOKEN, LAST], "truncated", ""),
        ([BEGIN, END], "empty", ""),
        ([BEGIN, ("event", "<html>"), END], "malformed", ""),
        ([("write", b"SSH-2.0-OpenSSH\r\n\r\n")], "malformed", ""),
        ([BEGIN, TOKEN, ("hang_up",)], "disconnected", ""),
        ([("hang_up",)], "disconnected", ""),
    ],
)  # fmt: skip
def test_each_kind_of_failure_is_told_from_the_others(steps: list[tuple[Any, ...]], kind: str, said: str) -> None:
    (timeline,), _ = ask(answering(*steps))
    assert timeline.failure.kind == kind
    assert not said or str(timeline.failure) == said


async def test_an_answer_that_takes_longer_than_the_request_may_is_not_read_by_the_next_one() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.body["prompt"] == "slow":
            await exchange.begin()
            await late.wait()
        await complete(exchange)

    late, slow, fast = asyncio.Event(), Timeline("test", max_tokens=3), Timeline("test", max_tokens=2)
    async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
        await Api(http, RequestShape("smol", timeout_s=0.02)).ask("slow", slow)
        await Api(http, RequestShape("smol")).ask("fast", fast)
        late.set()
    assert slow.failure.kind == "timeout"
    assert fast.succeeded
    assert (len(fast.chunk_times), server.connections) == (2, 2)


async def test_nobody_there() -> None:
    async with serving(complete) as server:
        address = Address.of_url(server.url)
    timeline = Timeline("test", max_tokens=3)
    async with HttpClient(address) as http:
        await Api(http, RequestShape("smol")).ask("hello", timeline)
    assert timeline.failure.kind == "connect"


@pytest.mark.parametrize(
    ("url", "authority", "base_path"),
    [
        ("http://localhost:8000", "localhost:8000", ""),
        ("localhost:8000/", "localhost:8000", ""),
        ("http://localhost:8000/v1/", "localhost:8000", ""),
        ("https://example.org/serve", "example.org:443", "/serve"),
        ("http://[::1]:80", "[::1]:80", ""),
    ],
)
def test_a_url_may_be_written_in_the_usual_ways(url: str, authority: str, base_path: str) -> None:
    address = Address.of_url(url)
    assert (address.authority, address.base_path) == (authority, base_path)
    assert (address.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host", "http://", "http://host:port", "", "http://a..b:8000", f"http://{'a' * 64}:8000",
        "http://localhost:8000/日本",
    ],
)  # fmt: skip
def test_what_is_no_url_or_what_no_request_can_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        Address.of_url(url)
