"""What a node's steps take, learnt from its own steps: two sums of a few terms each, with coefficients in seconds.

A step that reads no prompt gives each of its rows a token, and reads the rows' contexts. A step that reads prompts takes what their
tokens take, and besides what its rows take without the first term: it reads the weights only once. Terms that bend at a size follow
devices for which the first rows of a step cost least, or most.
"""

from __future__ import annotations

import msgspec

# A prompt's terms: once, each token, each of the first ones, each beyond, and each pair of a token and one that it reads.
FIRST_TOKENS, MANY_TOKENS = 64, 512
# A row's: once, each row, each of the first ones, each beyond, and each token of the rows' contexts.
FIRST_ROWS, MANY_ROWS = 4, 32
TERMS = 5


class StepCosts(msgspec.Struct, frozen=True, gc=False):
    prompts: tuple[float, ...] = (0.0,) * TERMS
    rows: tuple[float, ...] = (0.0,) * TERMS
    # How many measurements these were learnt from; and how wrong they were before each, lately and on average, as a share.
    prompts_seen: int = 0
    rows_seen: int = 0
    prompts_error: float = 0.0
    rows_error: float = 0.0
    # The largest that was measured
    most_prompt_tokens: int = 0
    most_rows: int = 0

    def prompt_s(self, tokens: float, pairs: float) -> float:
        """The seconds of a step that reads `tokens` of prompts and writes nothing."""
        return _sum(self.prompts, of_prompts(tokens, pairs))

    def rows_s(self, rows: float, context: float) -> float:
        """The seconds of a step that only writes. `context`: of all rows together."""
        return _sum(self.rows, of_rows(rows, context))

    @property
    def saved_s(self) -> float:
        """How much less a step takes that does both than two that do one each."""
        return self.rows[0]


def of_prompts(tokens: float, pairs: float) -> tuple[float, ...]:
    return 1.0, tokens, min(tokens, FIRST_TOKENS), max(tokens - MANY_TOKENS, 0.0), pairs


def of_rows(rows: float, context: float) -> tuple[float, ...]:
    return 1.0, rows, min(rows, FIRST_ROWS), max(rows - MANY_ROWS, 0.0), context


def _sum(coefficients: tuple[float, ...], terms: tuple[float, ...]) -> float:
    return sum(one * other for one, other in zip(coefficients, terms, strict=True))
