from __future__ import annotations

import pytest

from tandem.loadgen.timeline import RequestFailure, Timeline


def timeline(*chunks: float, sent_at: float = 100.0, reported: int | None = None) -> Timeline:
    made = Timeline("random", max_tokens=4, prompt_tokens=10)
    made.sent_at = sent_at
    made.chunk_times = [sent_at + chunk for chunk in chunks]
    made.reported_tokens = reported
    return made


def test_times_are_those_between_chunks_and_a_token_counts_as_the_server_says() -> None:
    made = timeline(0.25, 0.5, 1.0)
    assert (made.ttft, made.e2e, made.tpot) == pytest.approx((0.25, 1.0, 0.75 / 2))
    assert made.inter_token == pytest.approx([0.25, 0.5])
    assert timeline(0.25, 0.5, 1.0, reported=6).tpot == pytest.approx(0.75 / 5)
    alone = timeline(0.25)
    assert (alone.tpot, alone.inter_token) == (None, [])


def test_a_failure_is_not_a_success() -> None:
    made = timeline(0.25)
    assert made.succeeded
    made.failure = RequestFailure("timeout", "too late")
    assert not made.succeeded
