"""The percentile of measured values, interpolated: one way for benchmarks, simulations and what a cluster grades."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ascending: Sequence[float], percent: float) -> float:
    """`ascending` must have at least one value."""
    place = (len(ascending) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)
