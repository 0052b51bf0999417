"""By when the next first token comes, from how long the last ones took beside what was expected of them.

This is conformal prediction: while requests are alike, whatever their distribution, the share that comes in time is at least
the confidence, and at most one part in the number of observations above it. While a cluster becomes slower all the time, its
past is too quick. So each confidence works with a level of its own, which every quote that was missed raises, and every one
that was kept lowers (adaptive conformal inference: Gibbs and Candès, 2021).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import NamedTuple

WINDOW = 300  # the observations that count; after a change of the cluster's speed, as many requests until none is older
LEAST = 20
STEP = (
    0.01  # by which a missed quote raises a level of certainty; a larger one follows sooner, and makes quotes less even
)
QUICKEST = 50  # the quickest of so many shows what a first token takes besides waiting and reading


class Outlook(NamedTuple):
    """What is known of a request's first token when it is quoted."""

    unit_s: float  # the quote is a multiple of it
    multiples: list[float]  # that the last ones took, in their order; [] while they are too few


class FirstTokenTimes:
    """Expected seconds are above 0: at least one token is always read."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._levels = [hundredth / 100 for hundredth in range(100)]  # by confidence

    def __len__(self) -> int:
        return len(self._pairs)

    def observe(self, expected_s: float, took_s: float) -> None:
        self._pairs.append((expected_s, took_s))

    def outlook(self, expected_s: float) -> Outlook:
        """What took longer than expected is nearly a multiple of it in a line, and nearly the same time for a short prompt
        without one. So times are compared as multiples of what was expected and the quickest first token together.
        """
        if len(self._pairs) < LEAST:
            return Outlook(expected_s, [])
        besides = sorted([took for _, took in self._pairs])[len(self._pairs) // QUICKEST]
        return Outlook(expected_s + besides, sorted([took / (expected + besides) for expected, took in self._pairs]))

    def within_s(self, outlook: Outlook, confidence: float) -> float | None:
        """Returns the seconds in which the first token comes with this confidence. None while there are too few observations
        for it."""
        count = len(outlook.multiples)
        if count < needed(confidence):
            return None
        level = self._levels[min(max(round(100 * confidence), 1), 99)]
        return outlook.multiples[_rank(count, level) - 1] * outlook.unit_s

    def learn(self, outlook: Outlook, took_s: float) -> None:
        """The first token of a request that was quoted has come."""
        count = len(outlook.multiples)
        if count < LEAST:
            return
        # The fewest of the multiples within which it came.
        came = bisect_left(outlook.multiples, took_s / outlook.unit_s) + 1
        moved = (
            level + STEP * (hundredth / 100 - (came <= _rank(count, level)))
            for hundredth, level in enumerate(self._levels)
        )
        self._levels = list(accumulate((min(max(level, 0.0), 1.0) for level in moved), max))


def needed(confidence: float) -> int:
    """The fewest observations for this confidence: the largest one must be late with a smaller probability."""
    return max(LEAST, math.ceil(round(confidence / (1 - confidence), 6)))


def _rank(count: int, level: float) -> int:
    """Which of the observations, in their order, the next one exceeds with probability 1 - `level` at most: it is as
    likely to lie in any of the `count` + 1 gaps between them."""
    return min(max(math.ceil(round((count + 1) * level, 6)), 1), count)
