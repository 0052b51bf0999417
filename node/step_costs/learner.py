"""A fit of steps' times that forgets, and follows a machine that changes its speed.

Two parts change at two speeds. The shape, by how much more a larger step takes, is a fit without negative coefficients over the last
steps of each size: only measurements of a like step replace one, so a size that is rare now is still known. The pace is one factor for all steps, and follows within a few of them. So a machine that computes at
half its speed is known to do so in every kind of step, also in those that it has not made since.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tandem.wire.step_costs import ALONE, TERMS, StepCosts, terms_of

KEEP = 0.95  # of what earlier measurements of this size count, with each new one
MOST_SIZES = 400  # those that were measured last
# Measurements of a kind after which its shape is trusted: the pace follows, and outliers are cut
SETTLED = 30
LEAST_S = 1e-6  # a step that took less was not measured: its clock stood still
PACE_OF = 15  # measurements whose median is the pace: half of them may be outliers
ERROR_GAIN = 0.05  # the weight of the newest measurement
MOST_OFF = 2.0  # an outlier counts to the shape as this many times what was expected, or as such a part of it
SOLVE_EVERY = 32  # measurements, once the kind is settled: solving takes longer than adding one
# Sizes of which a node that starts with kept costs believes to have measured them.
_PROMPTS, _ROWS, _CONTEXTS, _TIMES = (1, 64, 512, 2048), (1, 4, 32, 128), (0, 2048), 3
# How much the last solution counts for each term where measurements say nothing; less for those that are taken for the cause of a
# time while only one size was seen: each token of a prompt, and that a step only writes.
_TIES = np.full(TERMS, 1e-6)
_TIES[[1, ALONE]] = 1e-7


class Shape:
    """Non-negative least squares of relative errors. Relative, because short steps matter as much as long ones; and because a step
    that was stopped for long then counts little."""

    def __init__(self) -> None:
        self._solution = np.zeros(TERMS)
        # By the powers of two of a step's sizes: the sums of products of terms, and of terms and seconds in the last column
        self._sums: dict[tuple[int, ...], NDArray[np.float64]] = {}
        self._unsolved = 0

    def expect(self, terms: tuple[float, ...], solve_every: int) -> float:
        if self._unsolved >= solve_every:
            self.solve()
        return float(self._solution @ np.array(terms))

    def add(self, size: tuple[int, ...], terms: tuple[float, ...], seconds: float, most: float) -> None:
        """`most`: as for a step of so many seconds does the error count."""
        relative = np.array((*terms, seconds)) / most
        before = self._sums.pop(size, 0.0)
        self._sums[size] = KEEP * before + np.outer(relative[:-1], relative)
        if len(self._sums) > MOST_SIZES:
            del self._sums[next(iter(self._sums))]
        self._unsolved += 1

    def solve(self) -> NDArray[np.float64]:
        if not self._unsolved:
            return self._solution
        self._unsolved = 0
        sums = np.sum(list(self._sums.values()), axis=0)
        products, targets = sums[:, :-1], sums[:, -1]
        # Terms that were never above 0 have no coefficient.
        known = np.diag(products) > 0
        scale = np.sqrt(np.where(known, np.diag(products), 1.0))
        products = products / np.outer(scale, scale) + np.diag(_TIES)
        targets = targets / scale + _TIES * self._solution * scale
        # One that would be negative is left out, and comes back if it would help.
        taken, solution = known.copy(), np.zeros(TERMS)
        for _ in range(3 * TERMS):
            solution = np.zeros(TERMS)
            solution[taken] = np.linalg.lstsq(products[np.ix_(taken, taken)], targets[taken], rcond=None)[0]
            if (solution < 0).any():
                taken[int(np.argmin(solution))] = False
                continue
            gains = np.where(known & ~taken, targets - products @ solution, 0.0)
            if gains.max() <= 1e-9:
                break
            taken[int(np.argmax(gains))] = True
        self._solution = np.maximum(solution, 0.0) / scale
        return self._solution


class StepLearner:
    def __init__(self, kept: StepCosts | None = None) -> None:
        """`kept`: what an earlier start of the node has learnt."""
        self._shape = Shape()
        self._ratios: deque[float] = deque(maxlen=PACE_OF)  # of steps' times to what the shape says of them
        kept = kept or StepCosts()
        self._seen = {True: kept.prompts_seen, False: kept.rows_seen}  # by whether the steps read prompts
        self._errors = {True: kept.prompts_error, False: kept.rows_error}
        self._most_prompt_tokens, self._most_rows = kept.most_prompt_tokens, kept.most_rows
        for context in _CONTEXTS * _TIMES:
            for tokens in _PROMPTS if kept.prompts_seen else ():
                pairs = tokens * context + tokens * (tokens + 1) // 2
                self._add(tokens, pairs, 0, 0, max(kept.prompt_s(tokens, pairs), LEAST_S))
            for rows in _ROWS if kept.rows_seen else ():
                self._add(0, 0, rows, rows * context, max(kept.rows_s(rows, rows * context), LEAST_S))

    def took(self, tokens: int, pairs: int, rows: int, context: int, seconds: float) -> None:
        """A step has read `tokens` of prompts, each with what it reads a pair of `pairs`, and written to `rows` answers with so much
        context together."""
        self._most_prompt_tokens, self._most_rows = (max(self._most_prompt_tokens, tokens), max(self._most_rows, rows))
        reads = bool(tokens)
        is_settled = self._seen[reads] >= SETTLED
        expected = self._shape.expect(terms_of(tokens, pairs, rows, context), SOLVE_EVERY if is_settled else 1)
        cut = usual = seconds / self._pace
        if is_settled and expected > 0:
            self._errors[reads] += ERROR_GAIN * (min(abs(expected / usual - 1), 1.0) - self._errors[reads])
            self._ratios.append(seconds / expected)
            usual = seconds / self._pace
            cut = min(max(usual, expected / MOST_OFF), expected * MOST_OFF)
        self._seen[reads] += 1
        self._add(tokens, pairs, rows, context, cut, max(cut, usual))

    def _add(self, tokens: int, pairs: int, rows: int, context: int, seconds: float, most: float = 0.0) -> None:
        """`most`: an outlier's whole time. It is cut, and counts less, too."""
        size = (tokens.bit_length(), pairs.bit_length(), rows.bit_length(), context.bit_length())
        self._shape.add(size, terms_of(tokens, pairs, rows, context), seconds, most or seconds)

    @property
    def _pace(self) -> float:
        return statistics.median(self._ratios) if self._ratios else 1.0

    def costs(self) -> StepCosts:
        pace = self._pace
        return StepCosts(
            tuple(float(pace * one) for one in self._shape.solve()),
            self._seen[True],
            self._seen[False],
            self._errors[True],
            self._errors[False],
            self._most_prompt_tokens,
            self._most_rows,
        )
