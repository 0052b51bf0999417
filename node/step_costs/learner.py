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

from tandem.wire.step_costs import TERMS, StepCosts, of_prompts, of_rows

KEEP = 0.95  # of what earlier measurements of this size count, with each new one
SETTLED = 30  # measurements after which the shape is trusted: the pace follows, and outliers are cut
PACE_OF = 15  # measurements whose median is the pace: half of them may be outliers
ERROR_GAIN = 0.05  # the weight of the newest measurement
MOST_OFF = 2.0  # an outlier counts to the shape as this many times what was expected, or as such a part of it
SOLVE_EVERY = 32  # measurements, once it is settled: solving takes longer than adding one
# Sizes of which a node that starts with kept costs believes to have measured them.
_PROMPTS, _ROWS, _CONTEXTS, _TIMES = (1, 64, 512, 2048), (1, 4, 32, 128), (0, 2048), 3
# How much the last solution counts where measurements say nothing, for each term; less for the one that is taken for the cause of a
# time while only one size was seen.
_TIE, _LIKELY = 1e-6, 1e-7


class Fit:
    """Non-negative least squares of relative errors. Relative, because short steps matter as much as long ones; and because a step
    that was stopped for long then counts little."""

    def __init__(self, likely: int) -> None:
        """`likely`: the term that is taken for the cause of a time before sizes differ."""
        self.seen = 0
        self._solution = np.zeros(TERMS)
        self._ties = np.full(TERMS, _TIE)
        self._ties[likely] = _LIKELY
        # By the powers of two of a step's size: the sums of products of terms, and of terms and seconds in the last column
        self._sums: dict[tuple[int, ...], NDArray[np.float64]] = {}
        self._unsolved = 0

    def expect(self, terms: tuple[float, ...]) -> float:
        if self._unsolved >= (SOLVE_EVERY if self.seen > SETTLED else 1):
            self._solve()
        return float(self._solution @ np.array(terms))

    def add(self, terms: tuple[float, ...], seconds: float, whole: float) -> None:
        """`seconds` of a step of `whole` seconds were due to these terms."""
        relative = np.array((*terms, seconds)) / whole
        size = (int(terms[1]).bit_length(), int(terms[-1]).bit_length())
        self._sums[size] = KEEP * self._sums.get(size, 0.0) + np.outer(relative[:-1], relative)
        self.seen += 1
        self._unsolved += 1

    def solution(self) -> NDArray[np.float64]:
        if self._unsolved:
            self._solve()
        return self._solution

    def _solve(self) -> None:
        self._unsolved = 0
        sums = np.sum(list(self._sums.values()), axis=0)
        products, targets = sums[:, :-1], sums[:, -1]
        sizes = np.diag(products).copy()
        ties = self._ties * sizes
        products, targets = products + np.diag(ties), targets + ties * self._solution
        # Terms that were never above 0 have no coefficient. One that would be negative is left out, and comes back if it would help.
        known = sizes > 0
        taken = known.copy()
        solution = np.zeros(TERMS)
        for _ in range(3 * TERMS):
            solution = _solved(products, targets, taken)
            if (solution < 0).any():
                taken[int(np.argmin(solution * np.sqrt(sizes)))] = False
                continue
            gains = np.where(
                known & ~taken, (targets - products @ solution) / np.sqrt(np.where(known, sizes, 1.0)), 0.0
            )
            if gains.max() <= 1e-9:
                break
            taken[int(np.argmax(gains))] = True
        self._solution = np.maximum(solution, 0.0)


def _solved(
    products: NDArray[np.float64], targets: NDArray[np.float64], taken: NDArray[np.bool_]
) -> NDArray[np.float64]:
    solution = np.zeros(TERMS)
    if taken.any():
        scale = np.sqrt(np.diag(products))[taken]
        inner = products[np.ix_(taken, taken)] / np.outer(scale, scale)
        solution[taken] = np.linalg.lstsq(inner, targets[taken] / scale, rcond=None)[0] / scale
    return solution


class StepLearner:
    def __init__(self, kept: StepCosts | None = None) -> None:
        """`kept`: what an earlier start of the node has learnt."""
        self._prompts, self._rows = Fit(1), Fit(0)
        self._ratios: deque[float] = deque(
            maxlen=PACE_OF
        )  # of what the last steps took to what the shape says
        kept = kept or StepCosts()
        self._prompts_error, self._rows_error = kept.prompts_error, kept.rows_error
        self._most_prompt_tokens, self._most_rows = kept.most_prompt_tokens, kept.most_rows
        for context in _CONTEXTS * _TIMES:
            for tokens in _PROMPTS if kept.prompts_seen else ():
                pairs = tokens * context + tokens * (tokens + 1) // 2
                seconds = kept.prompt_s(tokens, pairs)
                self._prompts.add(of_prompts(tokens, pairs), seconds, seconds)
            for rows in _ROWS if kept.rows_seen else ():
                seconds = kept.rows_s(rows, rows * context)
                self._rows.add(of_rows(rows, rows * context), seconds, seconds)
        self._prompts.seen, self._rows.seen = kept.prompts_seen, kept.rows_seen

    def read(self, tokens: int, pairs: int, rows: int, context: int, seconds: float) -> None:
        """A step has read prompts, and written to `rows` answers."""
        beside = 0.0
        if rows:
            beside = self._rows.expect(of_rows(rows, context)) - self._rows.expect(of_rows(0, 0))
        self._most_prompt_tokens = max(self._most_prompt_tokens, tokens)
        self._prompts_error = self._learn(
            self._prompts, of_prompts(tokens, pairs), beside, seconds, self._prompts_error
        )

    def wrote(self, rows: int, context: int, seconds: float) -> None:
        """A step has only written, to `rows` answers."""
        self._most_rows = max(self._most_rows, rows)
        self._rows_error = self._learn(self._rows, of_rows(rows, context), 0.0, seconds, self._rows_error)

    def _learn(
        self, fit: Fit, terms: tuple[float, ...], beside: float, seconds: float, error: float
    ) -> float:
        """`beside`: what else is in this step, at the usual pace. Returns the error, with this step in it."""
        expected = fit.expect(terms) + beside
        usual = seconds / self._pace
        if fit.seen >= SETTLED and expected > 0:
            error += ERROR_GAIN * (min(abs(expected / usual - 1), 1.0) - error)
            self._ratios.append(seconds / expected)
            usual = min(max(usual, expected / MOST_OFF), expected * MOST_OFF)
        # An outlier is cut, and counts less, too.
        fit.add(terms, usual - beside, max(usual, seconds / self._pace))
        return error

    @property
    def _pace(self) -> float:
        return statistics.median(self._ratios) if self._ratios else 1.0

    def costs(self) -> StepCosts:
        pace = self._pace
        return StepCosts(
            tuple(float(pace * one) for one in self._prompts.solution()),
            tuple(float(pace * one) for one in self._rows.solution()),
            self._prompts.seen,
            self._rows.seen,
            self._prompts_error,
            self._rows_error,
            self._most_prompt_tokens,
            self._most_rows,
        )
