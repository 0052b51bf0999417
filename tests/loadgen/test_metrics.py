from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.percentile import percentile
from tandem.loadgen.metrics import Distribution, parse_service_level, summarize
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


def test_a_distribution_is_in_milliseconds() -> None:
    made = Distribution.of([0.1, 0.2, 0.3])
    assert made is not None
    assert (made.mean, made.p50, made.max) == pytest.approx((200, 200, 300))


def test_throughput_is_over_the_whole_run() -> None:
    summary = summarize("random", [served(0.1, 0.2), served(0.1, 0.3, prompt=30)], duration_s=4.0)
    assert summary.requests_per_s == pytest.approx(0.5)
    assert summary.input_tokens_per_s == pytest.approx(10.0)
    assert summary.output_tokens_per_s == pytest.approx(1.0)


def test_every_gap_of_every_request_counts_once() -> None:
    summary = summarize("random", [served(0.0, 0.1, 0.2), served(0.0, 0.4)], duration_s=1.0)
    assert summary.itl_ms is not None
    assert summary.itl_ms.mean == pytest.approx(200)


def test_failures_are_counted_by_kind_and_do_not_enter_the_latencies() -> None:
    timelines = [served(0.1, 0.2), failed("http_503", "full"), failed("timeout"), failed("http_503", "still full")]
    summary = summarize("random", timelines, duration_s=1.0)
    assert (summary.succeeded, summary.failed) == (1, 3)
    assert [(f.kind, f.count, f.example) for f in summary.failures] == [("http_503", 2, "full"), ("timeout", 1, "no")]
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.max == pytest.approx(100)
    assert summary.input_tokens == 10


def test_a_run_without_a_success_has_no_latencies() -> None:
    summary = summarize("random", [failed("connect")], duration_s=1.0, slo=parse_service_level("ttft=1s"))
    assert summary.ttft_ms is None
    assert summary.output_tokens_per_s == 0
    assert (summary.goodput_per_s, summary.attainment) == (0, 0)


def test_answers_that_end_early_are_counted() -> None:
    assert summarize("random", [served(0.1, 0.2, asked=5), served(0.1, 0.2)], 1.0).short_answers == 1


def test_goodput_counts_requests_within_every_limit_and_attainment_all_that_were_sent() -> None:
    good = served(0.1, 0.15, 0.2)
    late = served(0.5, 0.55)
    stalled = served(0.1, 0.15, 0.9)
    summary = summarize(
        "random",
        [good, late, stalled, failed("timeout")],
        duration_s=2.0,
        slo=parse_service_level("ttft=200,itl=100ms"),
    )
    assert summary.goodput_per_s == pytest.approx(0.5)
    assert summary.attainment == pytest.approx(0.25)
    assert summary.slo == "ttft ≤ 200 ms, itl ≤ 100 ms"


def test_without_a_service_level_there_is_no_goodput() -> None:
    assert summarize("random", [served(0.1)], 1.0).goodput_per_s is None
