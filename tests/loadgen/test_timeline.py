from __future__ import annotations

import pytest

from tandem.loadgen.timeline import RequestFailure, Timeline


def timeline(*chunks: float, sent_at: float = 100.0, reported: int | None = None) -> Timeline:
    made = Timeline("random", max_tokens=4, prompt_tokens=10)
    made.sent_at = sent_at
    made.chunk_times = [sent_at + chunk for chunk in chunks]
    made.reported_tokens = reported
    return made


def test_the_first_chunk_ends_the_time_to_first_token_and_the_last_the_request() -> None:
    made = timeline(0.25, 0.5, 1.0)
    assert made.ttft == pytest.approx(0.25)
    assert made.e2e == pytest.approx(1.0)


def test_time_per_output_token_leaves_out_the_first_token_and_its_time() -> None:
    assert timeline(0.25, 0.5, 1.0).tpot == pytest.approx(0.75 / 2)


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    assert timeline(0.25).tpot is None


def test_time_per_output_token_counts_the_servers_tokens_not_its_chunks() -> None:
    assert timeline(0.25, 0.5, 1.0, reported=6).tpot == pytest.approx(0.75 / 5)


def test_inter_token_latency_is_between_one_chunk_and_the_next() -> None:
    assert timeline(0.25, 0.5, 1.0).inter_token == pytest.approx([0.25, 0.5])
    assert timeline(0.25).inter_token == []


def test_a_failure_is_not_a_success() -> None:
    made = timeline(0.25)
    assert made.succeeded
    made.failure = RequestFailure("timeout", "too late")
    assert not made.succeeded
