from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.base.percentile import percentile
from tandem.loadgen.metrics import Distribution, ServiceLevel, parse_service_level, summarize
from tandem.loadgen.timeline import RequestFailure, Timeline


def served(*chunks: float, prompt: int = 10, asked: int | None = None) -> Timeline:
    made = Timeline("random", max_tokens=asked or len(chunks), prompt_tokens=prompt)
    made.chunk_times = list(chunks)
    return made


def failed(kind: str, message: str = "no") -> Timeline:
    made = Timeline("random", max_tokens=4, prompt_tokens=10)
    made.failure = RequestFailure(kind, message)
    return made


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 95, 99, 99.9, 100]))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_throughput_is_over_the_whole_run_and_every_gap_of_every_request_counts_once() -> None:
    summary = summarize("random", [served(0.1, 0.2), served(0.1, 0.3, prompt=30)], duration_s=4.0)
    rates = (summary.requests_per_s, summary.input_tokens_per_s, summary.output_tokens_per_s)
    assert rates == pytest.approx((0.5, 10.0, 1.0))
    summary = summarize("random", [served(0.0, 0.1, 0.2), served(0.0, 0.4)], duration_s=1.0)
    assert summary.itl_ms.mean == pytest.approx(200)
    made = Distribution.of([0.1, 0.2, 0.3])
    assert (made.mean, made.p50, made.max) == pytest.approx((200, 200, 300)), "in milliseconds"


def test_failures_are_counted_by_kind_and_do_not_enter_the_latencies() -> None:
    timelines = [served(0.1, 0.2), failed("http_503", "full"), failed("timeout"), failed("http_503", "still full")]
    summary = summarize("random", timelines, duration_s=1.0)
    assert (summary.succeeded, summary.failed) == (1, 3)
    assert [(f.kind, f.count, f.example) for f in summary.failures] == [("http_503", 2, "full"), ("timeout", 1, "no")]
    assert summary.ttft_ms.max == pytest.approx(100)
    assert summary.input_tokens == 10
    summary = summarize("random", [failed("connect")], duration_s=1.0, slo=parse_service_level("ttft=1s"))
    assert (summary.ttft_ms, summary.output_tokens_per_s) == (None, 0), "a run without a success has no latencies"
    assert (summary.goodput_per_s, summary.attainment) == (0, 0)
    assert summarize("random", [served(0.1, 0.2, asked=5), served(0.1, 0.2)], 1.0).short_answers == 1


def test_goodput_counts_requests_within_every_limit_and_attainment_all_that_were_sent() -> None:
    good, late, stalled = served(0.1, 0.15, 0.2), served(0.5, 0.55), served(0.1, 0.15, 0.9)
    slo = parse_service_level("ttft=200,itl=100ms")
    summary = summarize("random", [good, late, stalled, failed("timeout")], duration_s=2.0, slo=slo)
    assert summary.goodput_per_s == pytest.approx(0.5)
    assert summary.attainment == pytest.approx(0.25)
    assert summary.slo == "ttft ≤ 200 ms, itl ≤ 100 ms"
    assert summarize("random", [served(0.1)], 1.0).goodput_per_s is None


def test_limits_are_milliseconds_unless_they_say_otherwise() -> None:
    assert parse_service_level("ttft=200, itl=50ms,e2e=1.5s") == ServiceLevel(ttft=0.2, itl=0.05, e2e=1.5)
    for text in ("", "ttft", "ttft=", "ttft=fast", "ttfb=200", "ttft=-1", "ttft=200,ttft=300"):
        with pytest.raises(ConfigurationError):
            parse_service_level(text)


@pytest.mark.parametrize(
    ("limits", "chunks", "met"),
    [
        ("ttft=100", (0.1, 9.0), True),
        ("ttft=100", (0.11, 0.12), False),
        ("tpot=100", (0.1, 0.2, 0.3), True),
        ("tpot=100", (0.1, 0.2, 0.35), False),
        ("tpot=100", (5.0,), True),  # one token: no client waited for a second
        ("itl=100", (5.0,), True),
        ("itl=100", (0.1, 0.15, 0.4), False),
        ("e2e=400", (0.1, 0.39), True),
        ("e2e=400", (0.1, 0.41), False),
        ("ttft=100,e2e=400", (0.2, 0.3), False),
    ],
)
def test_a_request_meets_all_limits_or_none_counts(limits: str, chunks: tuple[float, ...], met: bool) -> None:
    assert parse_service_level(limits).is_met_by(served(*chunks)) is met
    assert not parse_service_level(limits).is_met_by(failed("truncated"))


def test_one_hiccup_spoils_a_short_answer_and_not_a_long_one() -> None:
    level = parse_service_level("itl=20")
    steady = [0.01 * step for step in range(200)]
    hiccup = [*steady, steady[-1] + 1.0]
    assert level.is_met_by(served(*hiccup))
    assert not level.is_met_by(served(*hiccup[-10:]))


def test_times_are_those_between_chunks_and_a_token_counts_as_the_server_says() -> None:
    made = served(0.25, 0.5, 1.0)
    made.sent_at, made.chunk_times = 100.0, [100.0 + chunk for chunk in made.chunk_times]
    assert (made.ttft, made.e2e, made.tpot) == pytest.approx((0.25, 1.0, 0.75 / 2))
    assert made.inter_token == pytest.approx([0.25, 0.5])
    made.reported_tokens = 6
    assert made.tpot == pytest.approx(0.75 / 5)
    alone = served(0.25)
    assert (alone.tpot, alone.inter_token) == (None, [])
    assert (alone.succeeded, failed("timeout").succeeded) == (True, False)
