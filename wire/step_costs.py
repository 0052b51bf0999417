"""What a node's steps take, learnt from its own steps: a sum of a few terms, with coefficients in seconds.

Terms that bend at a size follow devices for which the first tokens or rows of a step cost least, or most.
"""

from __future__ import annotations

import msgspec

# A step that reads prompts: once, each of their tokens, each of the first ones, each beyond, and each pair of a token and one that it
# reads.
FIRST_TOKENS, MANY_TOKENS = 64, 512
# A step that writes: once if it reads no prompt, since it reads the weights only once; each row, each of the first ones, each beyond, and
# each token of the rows' contexts.
FIRST_ROWS, MANY_ROWS = 4, 32
TERMS = 10
ALONE = 5  # the term of a step that only writes


class StepCosts(msgspec.Struct, frozen=True, gc=False):
    coefficients: tuple[float, ...] = (0.0,) * TERMS
    # How many measurements these were learnt from, of steps with prompts and of those that only write; and how wrong the costs were
    # before each, lately and on average, as a share.
    prompts_seen: int = 0
    rows_seen: int = 0
    prompts_error: float = 0.0
    rows_error: float = 0.0
    # The largest that was measured
    most_prompt_tokens: int = 0
    most_rows: int = 0

    def prompt_s(self, tokens: float, pairs: float) -> float:
        """The seconds of a step that reads `tokens` of prompts and writes nothing."""
        return self._sum(terms_of(tokens, pairs, 0.0, 0.0))

    def rows_s(self, rows: float, context: float) -> float:
        """The seconds of a step that only writes. `context`: of all rows together."""
        return self._sum(terms_of(0.0, 0.0, rows, context))

    @property
    def saved_s(self) -> float:
        """How much less a step takes that does both than two that do one each: what one takes that only writes, for any number of rows."""
        return self.coefficients[ALONE]

    def _sum(self, terms: tuple[float, ...]) -> float:
        return sum(one * other for one, other in zip(self.coefficients, terms, strict=True))


def terms_of(tokens: float, pairs: float, rows: float, context: float) -> tuple[float, ...]:
    return (
        1.0 if tokens else 0.0,
        tokens,
        min(tokens, FIRST_TOKENS),
        max(tokens - MANY_TOKENS, 0.0),
        pairs,
        0.0 if tokens else 1.0,
        rows,
        min(rows, FIRST_ROWS),
        max(rows - MANY_ROWS, 0.0),
        context,
    )
