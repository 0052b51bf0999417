"""The one definition of a percentile: linear between the two nearest values."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one."""
    place = (len(ascending) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)
