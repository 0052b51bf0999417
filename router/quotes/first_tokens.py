"""By when the next first token comes, from how long the last ones took beside what was expected of them.

This is conformal prediction: while requests are alike, whatever their distribution, the share that comes in time is at least
the confidence, and at most one part in the number of observations above it.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 300  # the observations that count; after a change of the cluster's speed, as many requests until none is older
LEAST = 20
QUICKEST = 50  # the quickest of so many shows what a first token takes besides waiting and reading


class FirstTokenTimes:
    """Expected seconds are above 0: at least one token is always read."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._pairs)

    def observe(self, expected_s: float, took_s: float) -> None:
        self._pairs.append((expected_s, took_s))

    def within_s(self, expected_s: float, confidence: float) -> float | None:
        """Returns the seconds in which the first token comes with this confidence. None while there are too few observations
        for it.

        What took longer than expected is nearly a multiple of it in a line, and nearly the same time for a short prompt
        without one. So times are compared as multiples of what was expected and the quickest first token together.
        """
        count = len(self._pairs)
        if count < needed(confidence):
            return None
        besides = sorted([took for _, took in self._pairs])[count // QUICKEST]
        multiples = sorted([took / (expected + besides) for expected, took in self._pairs])
        return multiples[_rank(count, confidence) - 1] * (expected_s + besides)


def needed(confidence: float) -> int:
    """The fewest observations for this confidence: the largest one must be late with a smaller probability."""
    return max(LEAST, math.ceil(round(confidence / (1 - confidence), 6)))


def _rank(count: int, confidence: float) -> int:
    """Which of the observations, in their order, the next one exceeds with probability 1 - `confidence` at most: it is as
    likely to lie in any of the `count` + 1 gaps between them."""
    return math.ceil(round((count + 1) * confidence, 6))
