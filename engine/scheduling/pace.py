"""How many prompt tokens a step may compute.

A step gives each decoding request one token, and every one of them waits for the whole step. So while requests decode, a
step computes no more prompt tokens than this node computes within `scheduler.step_target_ms`, judged by its last steps
(`Pace`). While none decodes, prompts wait only for each other: the first may take the whole step, and others share it while
it is short.
"""

from __future__ import annotations

import math

# The smallest prompt budget, also when the decodes alone take as long as the target. On a CPU, reading the weights takes
# about as long as computing this many tokens with them, so a smaller budget would save little time and cost most of the
# prompt throughput.
FEWEST_TOKENS = 64
# While nothing decodes, a step may take this many times the target.
PROMPTS_ALONE = 4


class Pace:
    """Estimates how many prompt tokens fit into a step of the target's length."""

    def __init__(self, target_ms: float, *, is_timed: bool = False) -> None:
        """0 sets no target. Steps that are timed begin with few tokens, others with no limit until one took too long."""
        self._target_s = target_ms / 1000
        self.tokens: float = FEWEST_TOKENS if is_timed and target_ms else math.inf

    def took(self, num_tokens: int, seconds: float) -> None:
        """Corrects the estimate after a step with `num_tokens` prompt tokens.

        Part of a step's time does not grow with its tokens, so the proportional estimate is too low after a step shorter than
        the target, and too high after a longer one; each step brings it nearer. A short step with fewer tokens than the
        estimate says nothing against it, so the estimate falls only after a step that was too long or used all of it.
        """
        if not self._target_s or seconds <= 0:
            return
        fitting = max(int(num_tokens * self._target_s / seconds), FEWEST_TOKENS)
        if num_tokens >= self.tokens or seconds > self._target_s or fitting > self.tokens:
            self.tokens = fitting
