"""The stated confidence holds, whatever first tokens are distributed like, and again soon after they change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tandem.router.quotes.first_tokens import LEAST, WINDOW, FirstTokenTimes, Outlook, needed

CONFIDENCES = (0.5, 0.8, 0.9, 0.95, 0.99)
Draw = Callable[[random.Random], tuple[float, float]]
"""Draws what was expected, and what the first token took."""


def multiples(rng: random.Random) -> tuple[float, float]:
    expected = rng.lognormvariate(0, 1.5)
    return expected, expected * rng.lognormvariate(0.2, 0.5)


def with_a_heavy_tail(rng: random.Random) -> tuple[float, float]:
    expected = rng.uniform(0.01, 3)
    return expected, 0.02 + expected * rng.paretovariate(1.1)


def of_two_kinds(rng: random.Random) -> tuple[float, float]:
    """Short prompts, which a fixed time dominates, and long ones in a line."""
    if rng.random() < 0.3:
        return rng.uniform(0.0005, 0.002), rng.uniform(0.02, 0.03)
    expected = rng.uniform(1, 10)
    return expected, expected * rng.uniform(0.8, 1.0)


def unrelated(rng: random.Random) -> tuple[float, float]:
    return rng.uniform(0.1, 1), rng.expovariate(1)


def share_in_time(times: FirstTokenTimes, draw: Draw, rng: random.Random, confidence: float, count: int) -> float:
    quoted = kept = 0
    for _ in range(count):
        expected, took = draw(rng)
        outlook = times.outlook(expected)
        by = times.within_s(outlook, confidence)
        if by is not None:
            quoted += 1
            kept += took <= by
            times.learn(outlook, took)
        times.observe(expected, took)
    assert quoted > count / 2
    return kept / quoted


@pytest.mark.parametrize(
    ("draw", "confidence"),
    [
        *((draw, confidence) for draw in (multiples, unrelated) for confidence in (0.5, 0.9, 0.99)),
        *((draw, confidence) for draw in (with_a_heavy_tail, of_two_kinds) for confidence in (0.8, 0.95)),
    ],
)
def test_as_many_come_in_time_as_was_said(draw: Draw, confidence: float) -> None:
    share = share_in_time(FirstTokenTimes(), draw, random.Random(7), confidence, 1500)
    assert confidence - 0.02 < share < confidence + 0.03


@pytest.mark.parametrize(("times_as_slow", "confidence"), [(3.0, 0.5), (3.0, 0.9), (1 / 3, 0.5)])
def test_a_change_of_speed_is_forgotten_after_as_many_requests_as_are_remembered(
    confidence: float, times_as_slow: float
) -> None:
    def changed(rng: random.Random) -> tuple[float, float]:
        expected, took = multiples(rng)
        return expected, took * times_as_slow

    times, rng = FirstTokenTimes(), random.Random(3)
    share_in_time(times, multiples, rng, confidence, WINDOW)
    at_first = share_in_time(times, changed, rng, confidence, 50)
    assert at_first < confidence - 0.2 if times_as_slow > 1 else at_first > confidence
    share_in_time(times, changed, rng, confidence, WINDOW - 50)
    assert share_in_time(times, changed, rng, confidence, 1000) == pytest.approx(confidence, abs=0.03)


@pytest.mark.parametrize(("confidence", "least"), [(0.5, LEAST), (0.9, LEAST), (0.95, LEAST), (0.96, 24), (0.99, 99)])
def test_nothing_is_said_before_enough_is_known(confidence: float, least: int) -> None:
    assert needed(confidence) == least
    times = FirstTokenTimes()
    for count in range(least):
        assert len(times) == count
        assert times.within_s(times.outlook(1.0), confidence) is None
        times.observe(1.0, 1.0)
    assert times.within_s(times.outlook(1.0), confidence) == pytest.approx(1.0)


def test_more_confidence_is_never_an_earlier_time_nor_is_a_longer_line() -> None:
    times, rng = FirstTokenTimes(), random.Random(1)
    for _ in range(150):
        times.observe(*of_two_kinds(rng))
    for expected in (0.001, 0.1, 5.0):
        told = [times.within_s(times.outlook(expected), hundredths / 100) or 0.0 for hundredths in range(50, 100)]
        assert told == sorted(told)
    for confidence in CONFIDENCES:
        told = [
            times.within_s(times.outlook(expected), confidence) or 0.0 for expected in (0.001, 0.01, 0.1, 1.0, 10.0)
        ]
        assert told == sorted(told)


def test_short_prompts_without_a_line_do_not_make_the_quotes_of_others_late() -> None:
    """They take 20 times what is expected, because a step takes a while whatever it reads."""
    times, rng = FirstTokenTimes(), random.Random(2)
    for _ in range(WINDOW):
        times.observe(*of_two_kinds(rng))
    assert 5 < (times.within_s(times.outlook(6.0), 0.9) or 0.0) < 9


def test_the_clocks_unit_changes_nothing() -> None:
    seconds, milliseconds, rng = FirstTokenTimes(), FirstTokenTimes(), random.Random(5)
    for _ in range(200):
        expected, took = multiples(rng)
        seconds.observe(expected, took)
        milliseconds.observe(expected * 1000, took * 1000)
    slow, quick = milliseconds.within_s(milliseconds.outlook(700), 0.9), seconds.within_s(seconds.outlook(0.7), 0.9)
    assert slow == pytest.approx(1000 * (quick or 0.0))


@pytest.mark.parametrize("learns", [True, False])
def test_quotes_follow_a_cluster_that_becomes_slower_all_the_time(learns: bool) -> None:
    """First tokens become four times as slow within 1,500 requests. Each comes after eight more requests were quoted."""
    times, rng, count = FirstTokenTimes(), random.Random(11), 1500
    waiting: list[tuple[float, float, Outlook]] = []
    kept = dict.fromkeys(CONFIDENCES[:4], 0)
    for index in range(WINDOW + count):
        expected, took = multiples(rng)
        took *= 1 + 3 * max(index - WINDOW, 0) / count
        outlook = times.outlook(expected)
        waiting.append((expected, took, outlook))
        for confidence in kept:
            by = times.within_s(outlook, confidence)
            kept[confidence] += index >= WINDOW and by is not None and took <= by
        if len(waiting) > 8:
            expected, took, outlook = waiting.pop(0)
            times.observe(expected, took)
            if learns:
                times.learn(outlook, took)
    off = [confidence - of / count for confidence, of in kept.items()]
    assert max(off) < 0.05 if learns else min(off) > 0.04, (
        "what was faster is too quick without what is learnt of misses"
    )
