"""How much of a burst was served, refused and thrown away."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.bursting import (
    BurstClient,
    BurstFigures,
    BurstQuestion,
    BurstStage,
    Tokens,
    floors_of,
    measure,
    recovery,
    tokens_computed,
)
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.timeline import RequestFailure, Timeline

SLO = ServiceLevel(ttft=1.0)
STAGES = [
    BurstStage("before", 0, 10, 1.0),
    BurstStage("burst", 10, 30, 3.0),
    BurstStage("after", 30, 60, 1.0),
]


def asked(
    at: float, ttft: float | None = 0.1, failure: str = "", *, retry_after: bool = False
) -> BurstQuestion:
    timeline = Timeline("burst", 4, sent_at=100 + at, prompt_tokens=10, reported_tokens=4)
    if failure:
        timeline.failure = RequestFailure(failure, "why")
    elif ttft is not None:
        timeline.chunk_times = [100 + at + ttft]
    return BurstQuestion(timeline, at, retry_after)


def met(found: BurstFigures) -> dict[str, bool | None]:
    floors = floors_of(found)
    words = ("during", "until", "computed", "told")
    return {word: floor.met for word in words for floor in floors if word in floor.claim}


def test_goodput_is_by_when_a_request_was_sent_and_only_of_those_in_time() -> None:
    everyone = [asked(float(at)) for at in range(10)]
    everyone += [asked(10 + at / 3, ttft=0.1 if at % 3 == 0 else 5.0) for at in range(60)]
    everyone += [asked(30.0 + at) for at in range(30)]
    found = measure("tandem", 1.0, STAGES, everyone, Tokens(1000, 400), SLO)
    assert found.goodput == {"before": 1.0, "burst": 1.0, "after": 1.0}
    assert found.during_share == 1.0
    assert found.recovered_after_s == 0.0
    assert found.thrown_prompt_share == 0.0
    assert met(found) == {"during": True, "until": True, "computed": True, "told": True}


def test_what_is_in_no_whole_answer_was_thrown_away() -> None:
    everyone = [asked(1.0), asked(12.0, failure="timeout"), asked(31.0)]
    found = measure("tandem", 1.0, STAGES, everyone, Tokens(30, 12), SLO)
    assert found.thrown_prompt_share == pytest.approx(1 / 3)
    assert found.thrown_output_share == pytest.approx(1 / 3)
    assert (found.failed, found.turned_away) == (1, 0)
    assert not met(found)["computed"]


def test_who_is_turned_away_must_be_told_when_to_come_back() -> None:
    told = [asked(1.0), asked(12.0, failure="http_503", retry_after=True)]
    found = measure("tandem", 1.0, STAGES, told, Tokens(10, 4), SLO)
    assert (found.turned_away, found.with_retry_after, found.failed) == (1, 1, 0)
    assert met(found)["told"]
    untold = measure("tandem", 1.0, STAGES, [*told, asked(13.0, failure="http_503")], Tokens(10, 4), SLO)
    assert not met(untold)["told"]


def test_recovery_is_when_it_stays_as_it_was() -> None:
    before = [asked(float(at)) for at in range(10)]
    after = [asked(30.0 + at, ttft=5.0 if at < 8 or at == 15 else 0.1) for at in range(30)]
    back = recovery(before, after, STAGES[-1], SLO)
    assert back == 16.0


def test_what_is_not_back_while_it_is_watched_is_never_back() -> None:
    before = [asked(float(at)) for at in range(10)]
    after = [asked(30.0 + at, ttft=5.0) for at in range(30)]
    assert recovery(before, after, STAGES[-1], SLO) is None


def client(answer: httpx.Response, *, is_tandem: bool = True) -> BurstClient:
    return BurstClient(
        "http://server", "m", 5.0, is_tandem=is_tandem, transport=httpx.MockTransport(lambda request: answer)
    )


def ask(answer: httpx.Response) -> BurstQuestion:
    return asyncio.run(client(answer).ask("hello", 3.0, 4))


def test_an_answer_is_read_to_its_end() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    found = ask(httpx.Response(200, text=text))
    assert found.timeline.succeeded
    assert (found.timeline.prompt_tokens, found.timeline.output_tokens) == (7, 2)
    assert found.at == 3.0


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (httpx.Response(503, headers={"retry-after": "2"}), "http_503"),
        (httpx.Response(200, text='data: {"choices": [{"text": "a"}]}\n\n'), "truncated"),
        (httpx.Response(200, text="data: [DONE]\n\n"), "empty"),
        (httpx.Response(200, text='data: {"error": {"message": "no"}}\n\n'), "stream_error"),
    ],
)
def test_what_is_no_whole_answer_is_named(answer: httpx.Response, kind: str) -> None:
    found = ask(answer)
    assert found.timeline.failure is not None
    assert found.timeline.failure.kind == kind
    assert found.retry_after == (kind == "http_503")


def test_tokens_are_the_server_s_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bursting._QUIET_S", 0.0)
    nodes = [
        {"role": "prefill", "counters": {"prompt_tokens_computed": 90, "output_tokens": 3}},
        {"role": "decode", "counters": {"prompt_tokens_computed": 10, "output_tokens": 40}},
    ]
    ours = httpx.Response(200, json={"nodes": nodes})
    assert asyncio.run(tokens_computed(client(ours))) == Tokens(100, 40)
    text = 'vllm:prompt_tokens_total{engine="0",model_name="m"} 90.0\nvllm:generation_tokens_total{engine="0"} 40.0\n'
    theirs = client(httpx.Response(200, text=text), is_tandem=False)
    assert asyncio.run(tokens_computed(theirs)) == Tokens(90, 40)
