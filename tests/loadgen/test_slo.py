from __future__ import annotations

import pytest

from tandem.base.errors import ConfigurationError
from tandem.loadgen.metrics import ServiceLevel, parse_service_level
from tandem.loadgen.timeline import RequestFailure, Timeline


def served(*chunks: float) -> Timeline:
    made = Timeline("random", max_tokens=len(chunks))
    made.chunk_times = list(chunks)
    return made


def test_limits_are_milliseconds_unless_they_say_otherwise() -> None:
    assert parse_service_level("ttft=200, itl=50ms,e2e=1.5s") == ServiceLevel(ttft=0.2, itl=0.05, e2e=1.5)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=fast", "ttfb=200", "ttft=-1", "ttft=200,ttft=300"])
def test_what_is_no_limit_is_refused(text: str) -> None:
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


def test_one_hiccup_spoils_a_short_answer_and_not_a_long_one() -> None:
    level = parse_service_level("itl=20")
    steady = [0.01 * step for step in range(200)]
    hiccup = [*steady, steady[-1] + 1.0]
    assert level.is_met_by(served(*hiccup))
    assert not level.is_met_by(served(*hiccup[-10:]))


def test_a_failure_meets_nothing() -> None:
    made = served(0.1)
    made.failure = RequestFailure("truncated", "cut off")
    assert not ServiceLevel().is_met_by(made)
