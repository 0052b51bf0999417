"""The load generator against a server whose bytes the test decides: what it measures, and how it reports each kind of failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import Api, ApiEndpoint, Prompt, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.timeline import Timeline
from tests.loadgen.fake_server import Exchange, FakeServer, complete, serving

# Timers may be late, never early: what a delay was is known from below, and from above only roughly.
LATE_S = 2.0


def ask(
    answer: Callable[[Exchange], Awaitable[None]],
    *,
    times: int = 1,
    prompt: Prompt = "The quick fox",
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


def kind_of(answer: Callable[[Exchange], Awaitable[None]], shape: RequestShape | None = None) -> tuple[str, str]:
    (timeline,), _ = ask(answer, shape=shape)
    assert timeline.failure is not None
    return timeline.failure.kind, str(timeline.failure)


def test_known_delays_are_what_is_measured() -> None:
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

    async def run() -> None:
        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            await Api(http, RequestShape("smol")).ask("hello", timeline)

    asyncio.run(run())
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
        await complete_body(exchange)

    (timeline,), _ = ask(answer)
    assert timeline.ttft >= 0.03


async def complete_body(exchange: Exchange) -> None:
    await exchange.token()
    await exchange.end()


def test_a_request_says_what_was_asked_and_nothing_else() -> None:
    _, server = ask(complete, prompt=(1, 2, 3), shape=RequestShape("smol", temperature=0.5), max_tokens=7)
    (exchange,) = server.requests
    assert (exchange.method, exchange.path) == ("POST", "/v1/completions")
    assert exchange.body == {
        "model": "smol",
        "prompt": [1, 2, 3],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.5,
    }


def test_a_connection_is_used_again() -> None:
    timelines, server = ask(complete, times=3)
    assert all(timeline.succeeded for timeline in timelines)
    assert server.connections == 1


def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    async def answer(exchange: Exchange) -> None:
        await complete(exchange)
        await exchange.hang_up()

    timelines, server = ask(answer, times=3)
    assert all(timeline.succeeded for timeline in timelines)
    assert server.connections == 3


def test_without_usage_every_chunk_is_taken_for_a_token() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.token()
        await exchange.token()
        await exchange.end()

    (timeline,), _ = ask(answer)
    assert timeline.output_tokens == 2
    assert timeline.prompt_tokens == 99  # what the workload meant


def test_tokens_bundled_in_one_chunk_are_one_chunk_and_as_many_tokens() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.token(" one")
        await exchange.token(" two three four")
        await exchange.usage(5, 4)
        await exchange.end()

    (timeline,), _ = ask(answer)
    assert len(timeline.inter_token) == 1
    assert timeline.output_tokens == 4
    assert "".join(timeline.text) == " one two three four"


def test_a_chat_streams_opening_event_is_no_token() -> None:
    async def answer(exchange: Exchange) -> None:
        assert exchange.body["messages"] == [{"role": "user", "content": "hello"}]
        assert exchange.body["max_completion_tokens"] == 3
        await exchange.begin()
        await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.02)
        for word in ("Hi", " there"):
            await exchange.event({"choices": [{"index": 0, "delta": {"content": word}}]})
        await exchange.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await exchange.end()

    async def run() -> Timeline:
        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            timeline = Timeline("chat", max_tokens=3)
            api = Api(http, RequestShape("smol", endpoint=ApiEndpoint.CHAT))
            await api.ask([{"role": "user", "content": "hello"}], timeline)
            assert server.requests[0].path == "/v1/chat/completions"
            return timeline

    timeline = asyncio.run(run())
    assert timeline.succeeded
    assert timeline.ttft >= 0.02
    assert "".join(timeline.text) == "Hi there"


# --- kinds of failure


def test_an_error_status_is_told_with_the_servers_message() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.respond(503, {"error": {"message": "no worker", "type": "x", "code": "unavailable"}})

    assert kind_of(answer) == ("http_503", "no worker")


def test_an_error_status_without_an_error_object_is_told_with_its_body() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.respond(404, "not here")

    assert kind_of(answer) == ("http_404", '"not here"')


def test_an_error_within_the_stream() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.token()
        await exchange.event({"error": {"message": "node lost", "code": "node_lost"}})
        await exchange.write(b"0\r\n\r\n")

    assert kind_of(answer) == ("stream_error", "node lost")


def test_a_stream_that_stops_without_saying_so() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.token()
        await exchange.write(b"0\r\n\r\n")

    assert kind_of(answer)[0] == "truncated"


def test_a_stream_without_a_token() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.end()

    assert kind_of(answer)[0] == "empty"


def test_a_stream_of_something_else() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event("<html>")
        await exchange.end()

    assert kind_of(answer)[0] == "malformed"


def test_something_else_than_http() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    assert kind_of(answer)[0] == "malformed"


def test_a_connection_that_ends_within_the_answer() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.token()
        await exchange.hang_up()

    assert kind_of(answer)[0] == "disconnected"


def test_a_connection_that_ends_without_an_answer() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.hang_up()

    assert kind_of(answer)[0] == "disconnected"


def test_an_answer_that_takes_longer_than_the_request_may() -> None:
    async def run() -> Timeline:
        released = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            await exchange.begin()
            await released.wait()

        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            timeline = Timeline("test", max_tokens=3)
            await Api(http, RequestShape("smol", timeout_s=0.02)).ask("hello", timeline)
            released.set()
        return timeline

    timeline = asyncio.run(run())
    assert timeline.failure is not None
    assert timeline.failure.kind == "timeout"


def test_after_a_timeout_nobody_reads_the_rest_of_that_answer() -> None:
    async def run() -> tuple[Timeline, int]:
        late = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            if exchange.body["prompt"] == "slow":
                await exchange.begin()
                await late.wait()
            await complete(exchange)

        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            await Api(http, RequestShape("smol", timeout_s=0.02)).ask("slow", Timeline("test", 3))
            timeline = Timeline("test", max_tokens=2)
            await Api(http, RequestShape("smol")).ask("fast", timeline)
            late.set()
            return timeline, server.connections

    timeline, connections = asyncio.run(run())
    assert timeline.succeeded
    assert len(timeline.chunk_times) == 2
    assert connections == 2


def test_nobody_there() -> None:
    async def run() -> Timeline:
        async with serving(complete) as server:
            address = Address.of_url(server.url)
        async with HttpClient(address) as http:
            timeline = Timeline("test", max_tokens=3)
            await Api(http, RequestShape("smol")).ask("hello", timeline)
            return timeline

    timeline = asyncio.run(run())
    assert timeline.failure is not None
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


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        Address.of_url(url)


@pytest.mark.parametrize("url", ["http://a..b:8000", f"http://{'a' * 64}:8000", "http://localhost:8000/日本"])
def test_an_address_that_no_request_can_name_is_refused_as_one(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        Address.of_url(url)
