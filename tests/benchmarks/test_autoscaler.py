"""The benchmark `autoscaler` counts decisions that were taken back, and makes the loads that it names."""

from __future__ import annotations

import pytest

from benchmarks.autoscaler import MINUTE, made, reversed_of, spike
from tandem.simulator.outcome import SizeChange


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([(100.0, "decode", 3), (200.0, "decode", 2)], 0),
        ([(100.0, "decode", 3), (200.0, "prefill", 5), (650.0, "decode", 4)], 1),
        ([(100.0, "decode", 3), (700.0, "decode", 4)], 0),
        ([(100.0, "prefill", 6), (400.0, "prefill", 5), (500.0, "prefill", 6)], 2),
    ],
)
def test_a_decision_is_reversed_by_the_next_of_its_pool_within_ten_minutes(
    changes: list[tuple[float, str, int]], found: int
) -> None:
    assert reversed_of([SizeChange(at, role, size, "") for at, role, size in changes]) == found


def test_a_made_load_comes_as_fast_as_it_says() -> None:
    arrivals = [row.arrival_s for row in made(spike, 20).rows]
    during = sum(15 * MINUTE <= at < 18 * MINUTE for at in arrivals)
    assert during == pytest.approx(16 * 3 * MINUTE, rel=0.05)
    assert len(arrivals) - during == pytest.approx(4 * 17 * MINUTE, rel=0.05)
