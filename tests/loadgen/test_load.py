from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import Api, ApiEndpoint, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.load import LoadStream
from tandem.loadgen.workload import Session, SessionTurn, single
from tests.loadgen.fake_server import Exchange, FakeServer, complete, serving


def sessions(count: int) -> list[Session]:
    return [single(f"The {index}", 2, 2) for index in range(count)]


def run_load(
    answer: Callable[[Exchange], Awaitable[None]],
    asked: Sequence[Session],
    *,
    shape: RequestShape | None = None,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    during: Callable[[LoadStream, FakeServer], Awaitable[None]] | None = None,
) -> tuple[LoadStream, FakeServer]:
    async def run() -> tuple[LoadStream, FakeServer]:
        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            api = Api(http, shape or RequestShape("smol"))
            load = LoadStream("test", api, asked, concurrency=concurrency, arrivals=arrivals)
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                group.create_task(load.run())
                if during is not None:
                    group.create_task(during(load, server))
        return load, server

    return asyncio.run(run())


class Gate:
    """Holds answers back, and counts who waits."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most = 0
        self._changed = asyncio.Condition()
        self._open = 0

    async def answer(self, exchange: Exchange) -> None:
        async with self._changed:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._open > 0)
            self._open -= 1
            self.waiting -= 1
        await complete(exchange)

    async def until_waiting(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.waiting >= count)

    async def let_through(self, count: int) -> None:
        async with self._changed:
            self._open += count
            self._changed.notify_all()


def test_users_each_wait_for_their_answer() -> None:
    gate = Gate()

    async def during(load: LoadStream, server: FakeServer) -> None:
        await gate.until_waiting(3)
        assert len(load.active) == 3
        await gate.let_through(1)
        await gate.until_waiting(3)  # the free user asks again
        await gate.let_through(6)

    load, _ = run_load(gate.answer, sessions(7), concurrency=3, during=during)
    assert gate.most == 3
    assert len(load.timelines) == 7
    assert all(timeline.succeeded for timeline in load.timelines)


def test_without_a_limit_nobody_waits_for_an_answer_and_requests_are_sent_at_their_times() -> None:
    gate = Gate()

    async def during(load: LoadStream, server: FakeServer) -> None:
        await gate.until_waiting(5)
        await gate.let_through(5)

    arrivals = [0.0, 0.001, 0.002, 0.02, 0.05]
    load, _ = run_load(gate.answer, sessions(5), arrivals=arrivals, during=during)
    sent = sorted(timeline.sent_at - load.began_at for timeline in load.timelines)
    assert all(at >= meant for at, meant in zip(sent, arrivals, strict=True))
    assert load.duration_s >= 0.05


def test_a_stopped_load_sends_nothing_more_and_waits_for_what_it_sent() -> None:
    gate = Gate()

    async def during(load: LoadStream, server: FakeServer) -> None:
        await gate.until_waiting(2)
        load.stop()
        await gate.let_through(2)

    load, server = run_load(gate.answer, sessions(50), concurrency=2, during=during)
    assert len(server.requests) == 2
    assert all(timeline.succeeded for timeline in load.timelines)


def test_a_stop_does_not_wait_for_the_next_arrival() -> None:
    async def during(load: LoadStream, server: FakeServer) -> None:
        load.stop()

    load, _ = run_load(complete, sessions(2), arrivals=[0.0, 3600.0], during=during)
    assert len(load.timelines) <= 1


def conversation() -> Session:
    return Session((SessionTurn("The one", 2, 1), SessionTurn(" two", 1, 1), SessionTurn(" three", 1, 1)))


async def reply(exchange: Exchange) -> None:
    await exchange.begin()
    if "messages" in exchange.body:
        await exchange.event({"choices": [{"index": 0, "delta": {"content": " yes"}}]})
    else:
        await exchange.token(" yes")
    await exchange.end()


def test_a_conversation_goes_on_from_its_answers() -> None:
    load, server = run_load(reply, [conversation()], concurrency=1)
    assert load.total == 3
    assert [request.body["prompt"] for request in server.requests] == [
        "The one",
        "The one yes two",
        "The one yes two yes three",
    ]


def test_a_conversation_in_chat_is_a_list_of_messages() -> None:
    _, server = run_load(reply, [conversation()], shape=RequestShape("smol", endpoint=ApiEndpoint.CHAT))
    assert server.requests[2].body["messages"] == [
        {"role": "user", "content": "The one"},
        {"role": "assistant", "content": " yes"},
        {"role": "user", "content": " two"},
        {"role": "assistant", "content": " yes"},
        {"role": "user", "content": " three"},
    ]


def test_a_failed_turn_ends_its_conversation_and_no_other() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.body["prompt"].startswith("The bad"):
            await exchange.respond(500, {})
        else:
            await reply(exchange)

    bad = Session((SessionTurn("The bad", 2, 1), SessionTurn(" two", 1, 1)))
    load, server = run_load(answer, [bad, conversation()], concurrency=1)
    assert len(server.requests) == 4
    assert [timeline.succeeded for timeline in load.timelines] == [False, True, True, True]


@pytest.mark.parametrize("concurrency", [0, -1])
def test_at_least_one_user_is_needed(concurrency: int) -> None:
    async def make() -> None:
        LoadStream("test", Api(HttpClient(Address.of_url("localhost")), RequestShape("m")), [], concurrency=concurrency)

    with pytest.raises(ConfigurationError):
        asyncio.run(make())
