"""Probes accept the known answers and report every other one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.chaos.probes import Probes, longest_gap


def stream(text: str, done: bool = True) -> httpx.Response:
    events = [json.dumps({"choices": [{"text": word}]}) for word in text.split()]
    lines = [f"data: {event}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
    return httpx.Response(200, text="".join(lines))


def known(request: httpx.Request) -> str:
    """One answer for each prompt."""
    return f"answer {hash(json.loads(request.content)['prompt'])}"


class Server:
    """What the probes reach; a test may change how it answers."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.answer = answer
        self.probes = Probes(lambda: "http://tandem", "k3y", "tiny", 1, 2, httpx.MockTransport(self._handle))
        self._ending = asyncio.Event()
        self._last = 10**6

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self._last -= 1
        if self._last <= 0:
            self._ending.set()
        return self.answer(request)

    def get_asked(self, requests: int = 6) -> None:
        """The traffic ends with the request of this number."""

        async def work() -> None:
            self._ending, self._last = asyncio.Event(), requests
            async with asyncio.timeout(10):
                await self.probes.run(self._ending)

        asyncio.run(work())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.chaos.probes._RETRY_S", 0.0)


def test_right_answers_are_counted_and_each_request_has_the_key_and_a_salt_of_its_own() -> None:
    salts, keys = [], set()

    def answer(request: httpx.Request) -> httpx.Response:
        salts.append(json.loads(request.content)["cache_salt"])
        keys.add(request.headers["authorization"])
        return stream(known(request))

    server = Server(answer)
    made = server.probes
    assert asyncio.run(made.learn()) == len(made.questions)
    server.get_asked()
    assert made.counts.right == made.counts.requests >= 6
    assert len(set(salts)) == len(salts)
    assert keys == {"Bearer k3y"}


def test_an_answer_that_differs_is_wrong() -> None:
    server = Server(lambda request: stream(known(request)))
    made = server.probes
    asyncio.run(made.learn())
    server.answer = lambda request: stream("something else")
    server.get_asked()
    assert made.counts.right == 0
    assert len(made.counts.wrong) == made.counts.requests
    assert "instead of" in made.counts.wrong[0]


def test_a_question_with_two_answers_in_peace_is_not_held_against_the_cluster() -> None:
    count = iter(range(10**6))
    server = Server(lambda request: stream(f"answer {next(count)}"))
    made = server.probes
    assert asyncio.run(made.learn()) == 0
    server.get_asked()
    assert made.counts.unchecked == made.counts.requests
    assert made.counts.wrong == []


def _cut(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("connection reset")


@pytest.mark.parametrize(
    ("answer", "where", "name"),
    [
        (lambda request: stream("half of", done=False), "lost", "cut off"),
        (_cut, "lost", "ReadError"),
        (lambda request: httpx.Response(200, text='data: {"error": {"code": "node_lost", "message": "x"}}\n\n'), "failed", "node_lost"),
    ],
)  # fmt: skip
def test_what_is_no_whole_answer_is_counted_by_what_it_is(
    answer: Callable[[httpx.Request], httpx.Response], where: str, name: str
) -> None:
    server = Server(answer)
    made = server.probes
    server.get_asked()
    assert getattr(made.counts, where) == {name: made.counts.requests}
    assert name in made.counts.examples


def test_a_refusal_at_the_door_is_not_a_lost_request_and_in_peace_it_is_the_end() -> None:
    server = Server(lambda request: httpx.Response(503, text="full", headers={"retry-after": "1"}))
    made = server.probes
    server.get_asked()
    assert made.counts.refused == made.counts.requests
    assert not made.counts.lost
    assert not made.counts.failed
    made = Server(lambda request: httpx.Response(401, text="a key is needed")).probes
    with pytest.raises(Unavailable, match="a key is needed"):
        asyncio.run(made.learn())


def test_the_longest_gap_of_a_stretch_is_of_those_that_reach_into_it() -> None:
    gaps = [(0.0, 1.0), (2.0, 5.0), (4.5, 4.9), (9.0, 30.0)]
    assert longest_gap(gaps, 4.0, 6.0) == 3.0
    assert longest_gap(gaps, 6.0, 8.0) == 0.0
