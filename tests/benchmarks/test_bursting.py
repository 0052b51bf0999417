"""How much of a burst was served, refused and thrown away."""

from __future__ import annotations

import json

import pytest

from benchmarks.burst import BurstFigures, BurstStage, Tokens, floors_of, measure, recovery, tokens_computed
from benchmarks.lib.servers import System
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.timeline import RequestFailure, Timeline

SLO = ServiceLevel(ttft=1.0)
STAGES = [BurstStage("before", 0, 10, 1.0), BurstStage("burst", 10, 30, 3.0), BurstStage("after", 30, 60, 1.0)]


BEGAN = 100.0


def asked(at: float, ttft: float = 0.1, failure: str = "", *, retry_after: bool = False) -> Timeline:
    timeline = Timeline("burst", 4, sent_at=BEGAN + at, prompt_tokens=10, reported_tokens=4)
    if failure:
        timeline.failure = RequestFailure(failure, "why")
        timeline.failure.says_when_to_retry = retry_after
    else:
        timeline.chunk_times = [BEGAN + at + ttft]
    return timeline


def met(found: BurstFigures) -> dict[str, bool | None]:
    floors = floors_of(found)
    words = ("during", "until", "computed", "told")
    return {word: floor.met for word in words for floor in floors if word in floor.claim}


def test_goodput_is_by_when_a_request_was_sent_and_only_of_those_in_time() -> None:
    everyone = [asked(float(at)) for at in range(10)]
    everyone += [asked(10 + at / 3, ttft=0.1 if at % 3 == 0 else 5.0) for at in range(60)]
    everyone += [asked(30.0 + at) for at in range(30)]
    found = measure("tandem", 1.0, STAGES, BEGAN, everyone, Tokens(1000, 400), SLO)
    assert found.goodput == {"before": 1.0, "burst": 1.0, "after": 1.0}
    assert found.during_share == 1.0
    assert found.recovered_after_s == 0.0
    assert found.thrown_prompt_share == 0.0
    assert met(found) == {"during": True, "until": True, "computed": True, "told": True}


def test_what_is_in_no_whole_answer_was_thrown_away() -> None:
    everyone = [asked(1.0), asked(12.0, failure="timeout"), asked(31.0)]
    found = measure("tandem", 1.0, STAGES, BEGAN, everyone, Tokens(30, 12), SLO)
    assert found.thrown_prompt_share == pytest.approx(1 / 3)
    assert found.thrown_output_share == pytest.approx(1 / 3)
    assert (found.failed, found.turned_away) == (1, 0)
    assert not met(found)["computed"]


def test_who_is_turned_away_must_be_told_when_to_come_back() -> None:
    told = [asked(1.0), asked(12.0, failure="http_503", retry_after=True)]
    found = measure("tandem", 1.0, STAGES, BEGAN, told, Tokens(10, 4), SLO)
    assert (found.turned_away, found.with_retry_after, found.failed) == (1, 1, 0)
    assert met(found)["told"]
    untold = measure("tandem", 1.0, STAGES, BEGAN, [*told, asked(13.0, failure="http_503")], Tokens(10, 4), SLO)
    assert not met(untold)["told"]


def test_recovery_is_when_it_stays_as_it_was() -> None:
    before = [asked(float(at)) for at in range(10)]
    after = [asked(30.0 + at, ttft=5.0 if at < 8 or at == 15 else 0.1) for at in range(30)]
    back = recovery(before, after, BEGAN, STAGES[-1], SLO)
    assert back == 16.0


def test_what_is_not_back_while_it_is_watched_is_never_back() -> None:
    before = [asked(float(at)) for at in range(10)]
    after = [asked(30.0 + at, ttft=5.0) for at in range(30)]
    assert recovery(before, after, BEGAN, STAGES[-1], SLO) is None


def test_tokens_are_the_server_s_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"role": "prefill", "counters": {"prompt_tokens_computed": 90, "output_tokens": 3}},
        {"role": "decode", "counters": {"prompt_tokens_computed": 10, "output_tokens": 40}},
    ]
    metrics = (
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 90.0\nvllm:generation_tokens_total{engine="0"} 40.0\n'
    )
    told = {"/cluster": json.dumps({"nodes": nodes}), "/metrics": metrics}
    monkeypatch.setattr("benchmarks.burst._QUIET_S", 0.0)
    monkeypatch.setattr("benchmarks.burst.text_of", lambda url, path: told[path])
    assert tokens_computed(System("tandem-1p1d", "", ("true",), 1)) == Tokens(100, 40)
    assert tokens_computed(System("vllm-aggregated", "", ("true",), 1)) == Tokens(90, 40)
