"""The soak test finds failures, wrong answers, growth, and resources that are not given back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak import SoakVerdict, judge
from benchmarks.soaking.cluster import (
    Bounds,
    Growth,
    NodeLook,
    ProcessSample,
    ProcessWatch,
    gained,
    growth_of,
    is_whole,
)
from benchmarks.soaking.requests import Answer, AnswerEnd, SoakLoad, SoakQuestion, SoakQuestions, WrongAnswer, ask
from tandem.base.errors import Unavailable

WORDS = [f"word{index}" for index in range(50)]
MIB = 2**20


def samples(memory: Callable[[int], float], count: int = 60, descriptors: int = 20) -> list[ProcessSample]:
    return [ProcessSample(float(at), int(memory(at)), descriptors, 5) for at in range(count)]


class TestGrowth:
    def test_what_fills_up_in_the_beginning_does_not_grow(self) -> None:
        growth = growth_of("p", samples(lambda at: min(at, 15) * 100 * MIB))
        assert growth is not None
        assert growth.memory_grew == 0
        assert not Bounds().broken(growth)

    def test_what_leaks_grows_by_what_it_leaks(self) -> None:
        growth = growth_of("p", samples(lambda at: 500 * MIB + at * 3 * MIB))
        assert growth is not None
        assert growth.memory_grew == pytest.approx(39 * 3 * MIB)
        assert Bounds().broken(growth) == ["p: 117 MiB of memory"]

    def test_a_node_that_took_anothers_place_may_touch_its_cache_for_the_first_time(self) -> None:
        for was_there, leaks in ((True, True), (False, False)):
            growth = growth_of("p", samples(lambda at: 500 * MIB + at * 3 * MIB), was_there=was_there)
            assert growth is not None
            assert bool(Bounds().broken(growth)) is leaks
        watch = ProcessWatch()
        watch.look([os.getpid()], 0.0)
        for at in range(1, 20):
            watch.look([os.getpid(), os.getppid()], float(at))
        assert sorted(growth.was_there for growth in watch.growths()) == [False, True]

    def test_who_came_late_has_not_told_yet_whether_it_grows(self) -> None:
        watch = ProcessWatch()
        for at in range(100):
            watch.look([os.getpid()] if at < 80 else [os.getpid(), os.getppid()], float(at))
        (growth,) = watch.growths()
        assert growth.process.endswith(f" {os.getpid()}")

    def test_descriptors_and_threads_are_held_to_less(self) -> None:
        leaks = [ProcessSample(float(at), MIB, 20 + at, 5 + at // 4) for at in range(60)]
        growth = growth_of("p", leaks)
        assert growth is not None
        assert Bounds().broken(growth) == ["p: 39 descriptors", "p: 10 threads"]

    @given(st.lists(st.floats(0, 1e9), min_size=2, max_size=40))
    def test_a_gain_is_bounded_by_what_was_seen(self, values: list[float]) -> None:
        times = [float(at) for at in range(len(values))]
        span = max(values) - min(values)
        assert abs(gained(times, values)) <= 1.5 * span + 1e-6


def soaked(**fields: Any) -> SoakVerdict:
    given: dict[str, Any] = {
        "minutes": 1.0, "answered": 9, "aborted": 1, "tokens": 90, "by_kind": {}, "failures": {}, "examples": {}, "checked": 3, "wrong": [],
        "kills": [], "growths": [],
    }  # fmt: skip
    return SoakVerdict(**(given | fields))


class TestVerdict:
    def test_all_is_well(self) -> None:
        still = Growth("ray::DecodeActor 7", True, 60, 900 * MIB, 20 * MIB, 40, 1, 30, 0)
        assert judge(soaked(growths=[still])) == []

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"answered": 0}, "nothing was answered"),
            ({"checked": 0}, "no answer was one that is known"),
            (
                {"failures": {"http_503": 2}, "examples": {"http_503": "no node"}},
                "2 requests failed, http_503: no node",
            ),
            ({"wrong": ["question 1: 'a' instead of 'b'"]}, "1 wrong answers, the first: question 1"),
            ({"left_over": "not quiet"}, "not quiet"),
            ({"growths": [Growth("ray::RouterActor 7", True, 60, MIB, 99 * MIB, 1, 0, 1, 0)]}, "99 MiB of memory"),
        ],
    )
    def test_everything_that_must_not_be_is_said(self, fields: dict[str, Any], said: str) -> None:
        (fault,) = judge(soaked(**fields))
        assert said in fault

    def test_what_is_not_ours_is_shown_and_not_judged(self) -> None:
        assert not judge(soaked(growths=[Growth("gcs_server 7", True, 60, MIB, 99 * MIB, 1, 99, 1, 0)]))


def sse(*events: object, done: bool = True) -> bytes:
    lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def asked(content: bytes, status: int = 200, ending: AnswerEnd = AnswerEnd.STREAM, **body: Any) -> Answer | None:
    async def go() -> Answer | None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
        async with httpx.AsyncClient(transport=transport, base_url="http://r") as client:
            return await ask(client, SoakQuestion({"model": "m", **body}, False, ending, abort_after_s=60))

    return asyncio.run(go())


class TestAsking:
    @pytest.mark.parametrize(
        ("content", "status", "kind"),
        [
            (b"overloaded", 503, "http_503"),
            (sse({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}, done=False), 200, "truncated"),
            (sse({"choices": [{"index": 0, "text": "a"}]}), 200, "finish"),
            (b"event: error\n" + sse({"error": {"message": "lost"}}, done=False), 200, "stream_error"),
        ],
    )
    def test_what_is_no_answer_is_a_failure(self, content: bytes, status: int, kind: str) -> None:
        with pytest.raises(WrongAnswer) as failed:
            asked(content, status)
        assert failed.value.kind == kind


def loaded(answer: Callable[[int], Awaitable[httpx.Response]], monkeypatch: pytest.MonkeyPatch) -> SoakLoad:
    """A load whose server is a function, run until every user has asked some twenty times."""
    questions = SoakQuestions(WORDS, "m", 0)
    questions.known = questions.known[:1]
    load = SoakLoad("http://r", questions, users=2)
    count = 0

    async def respond(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        if count == 40:
            load._stopping.set()
        return await answer(count)

    monkeypatch.setattr(
        load, "_client", lambda: httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://r")
    )
    monkeypatch.setattr(
        questions,
        "draw",
        lambda: SoakQuestion(questions.known[0].body, False, AnswerEnd.WHOLE, known=0, kinds=("known",)),
    )

    async def go() -> None:
        await load.learn()
        await load.run(30)

    asyncio.run(go())
    return load


def completion(text: str) -> httpx.Response:
    choice = {"text": text, "finish_reason": "length"}
    return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 1}})


def test_nobody_asks_for_an_answer_that_follows_a_grammar_and_never_ends() -> None:
    questions = SoakQuestions(["word"], "model", seed=0)
    bodies = [questions.draw().body for _ in range(2000)]
    assert any("response_format" in body for body in bodies)
    assert not any("response_format" in body and body.get("ignore_eos") for body in bodies)


def test_an_answer_that_changes_is_wrong_and_one_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(count: int) -> httpx.Response:
        if count == 10:
            return httpx.Response(500, text="a bug")
        return completion("other" if count == 20 else "right")

    tally = loaded(answer, monkeypatch).tally
    assert tally.failures == {"http_500": 1}
    assert tally.wrong == ["question 0: 'other' instead of 'right'"]
    assert len(tally.news) == 2, "each is told once"
    assert tally.checked == tally.answered == tally.by_kind["known"]
    assert tally.answered >= 36


def test_a_server_that_contradicts_itself_in_peace_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(count: int) -> httpx.Response:
        return completion(f"answer {count}")

    with pytest.raises(Unavailable, match="differ"):
        loaded(answer, monkeypatch)


def test_a_cluster_is_whole_when_all_its_nodes_can_be_used() -> None:
    node = NodeLook("n", "a", "ready", None, 5, 5)
    assert is_whole([node], 1)
    assert node.is_quiet
    assert not is_whole([node], 2)
    assert not is_whole([msgspec.structs.replace(node, unusable="silent")], 1)
    assert not msgspec.structs.replace(node, held_blocks=1).is_quiet
