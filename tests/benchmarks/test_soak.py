"""The soak test finds failures, wrong answers, growth, and resources that are not given back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak import (
    Figures,
    Growth,
    MixedLoad,
    ProcessWatch,
    Question,
    Questions,
    SoakVerdict,
    WrongAnswer,
    ask,
    gained,
    growth_of,
    is_quiet,
    judge,
)

MIB = 2**20


def samples(memory: Callable[[int], float]) -> list[tuple[float, Figures]]:
    return [(float(at), {"memory": memory(at), "descriptors": 20.0, "threads": 5.0}) for at in range(60)]


def growth(process: str, memory: float, descriptors: float = 0) -> Growth:
    still = {"memory": MIB, "descriptors": 40, "threads": 30}
    return Growth(process, True, still, {"memory": memory, "descriptors": descriptors, "threads": 0})


class TestGrowth:
    def test_what_fills_up_in_the_beginning_does_not_grow(self) -> None:
        found = growth_of("p", samples(lambda at: min(at, 15) * 100 * MIB))
        assert found.gained["memory"] == 0
        assert not found.broken()

    @pytest.mark.parametrize("was_there", [True, False])
    def test_what_leaks_grows_unless_a_new_node_touches_its_cache_for_the_first_time(self, was_there: bool) -> None:
        found = growth_of("p", samples(lambda at: 500 * MIB + at * 3 * MIB), was_there=was_there)
        assert found.gained["memory"] == pytest.approx(39 * 3 * MIB)
        assert found.broken() == (["p: 117 MiB of memory"] if was_there else [])

    def test_a_process_that_came_late_may_still_fill_up(self) -> None:
        watch = ProcessWatch()
        for at in range(100):
            watch.look([os.getpid()] if at < 80 else [os.getpid(), os.getppid()], float(at))
        (found,) = watch.growths()
        assert found.was_there
        assert found.process.endswith(f" {os.getpid()}")

    def test_descriptors_and_threads_are_held_to_less(self) -> None:
        leaks = [(float(at), {"memory": MIB, "descriptors": 20.0 + at, "threads": 5.0 + at // 4}) for at in range(60)]
        found = growth_of("p", leaks)
        assert found.broken() == ["p: 39 descriptors", "p: 10 threads"]

    @given(st.lists(st.floats(0, 1e9), min_size=2, max_size=40))
    def test_a_gain_is_bounded_by_what_was_seen(self, values: list[float]) -> None:
        times = [float(at) for at in range(len(values))]
        assert abs(gained(times, values)) <= 1.5 * (max(values) - min(values)) + 1e-6


class TestVerdict:
    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"growths": [growth("ray::DecodeActor 7", 20 * MIB)]}, None),
            ({"growths": [growth("gcs_server 7", 99 * MIB)]}, None),
            ({"growths": [growth("ray::RouterActor 7", 99 * MIB)]}, "99 MiB of memory"),
            ({"by_kind": {}}, "nothing was answered"),
            ({"checked": 0}, "no answer was one that is known"),
            ({"failures": {"http_503": 2}, "examples": {"http_503": "none"}}, "2 requests failed, http_503: none"),
            ({"wrong": ["'a' instead of 'b'"]}, "1 wrong answers, the first: 'a'"),
            ({"kills": [{"name": "decode-1", "whole_after_s": None}]}, "not whole again: decode-1"),
            ({"left_over": "not quiet"}, "not quiet"),
        ],
    )
    def test_everything_that_must_not_be_is_said(self, fields: dict[str, Any], said: str | None) -> None:
        usual: dict[str, Any] = {
            "minutes": 1.0, "by_kind": {"chat": 3}, "failures": {}, "examples": {}, "checked": 3, "wrong": [], "kills": [], "growths": [],
        }  # fmt: skip
        faults = judge(SoakVerdict(**(usual | fields)))
        assert [said in fault for fault in faults] == [True] if said else faults == []


def sse(*events: object, done: bool = True) -> bytes:
    lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


CHOICE = {"index": 0, "text": "a", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (sse({"choices": [CHOICE]}), 200, None),
        (b"overloaded", 503, "http_503"),
        (sse({"choices": [CHOICE]}, done=False), 200, "truncated"),
        (sse({"choices": [CHOICE | {"finish_reason": None}]}), 200, "finish"),
        (b"event: error\n" + sse({"error": {"message": "lost"}}, done=False), 200, "stream_error"),
    ],
)
async def test_what_is_no_answer_is_a_failure(content: bytes, status: int, kind: str | None) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    question = Question({"model": "m", "prompt": "a", "stream": True}, ())
    async with httpx.AsyncClient(transport=transport, base_url="http://r") as http:
        if kind is None:
            assert await ask(http, question)
            return
        with pytest.raises(WrongAnswer) as failed:
            await ask(http, question)
    assert failed.value.kind == kind


def test_each_kind_of_question_is_drawn_and_a_grammars_answer_can_end() -> None:
    drawn = [Questions(["word"], "m", seed=seed).draw() for seed in range(2000)]
    kinds = {kind for question in drawn for kind in question.kinds}
    wanted = {"chat", "completion", "long", "short", "n=2", "stop", "logprobs", "json", "stream", "whole"}
    assert kinds == wanted | {"gone away from"}
    assert not any("response_format" in question.body and question.body.get("ignore_eos") for question in drawn)


def test_failures_are_counted_by_their_kind_and_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    load, ending, count = MixedLoad("http://r", Questions(["word"], "m", 0), users=2), asyncio.Event(), 0

    def respond(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        if count == 40:
            ending.set()
        return (
            httpx.Response(500, text=f"a bug, {count}")
            if count % 10 == 0
            else httpx.Response(200, json={"choices": [CHOICE]})
        )

    transport = httpx.MockTransport(respond)
    monkeypatch.setattr(load, "client", lambda: httpx.AsyncClient(transport=transport, base_url="http://r"))
    question = Question({"model": "m", "prompt": "a"}, ("completion",))
    monkeypatch.setattr(Questions, "draw", lambda questions: question)
    asyncio.run(load.run(ending))
    assert load.failures == {"http_500": 4}
    assert load.examples == {"http_500": "a bug, 10"}
    assert load.by_kind["completion"] == count - 4


def test_a_node_is_quiet_when_it_serves_and_has_everything_back() -> None:
    node = {"state": "ready", "unusable": None, "free_blocks": 5, "total_blocks": 5, "running": 0}
    assert is_quiet(node)
    for busy in ({"unusable": "silent"}, {"running": 1}, {"held_blocks": 1}, {"free_blocks": 4}, {"state": "draining"}):
        assert not is_quiet(node | busy)
