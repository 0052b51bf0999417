"""How many tokens of prompts a step computes while others decode.

A step gives everybody who decodes one token, and takes as long as everything that it computes: on a slow core a chunk
of a long prompt is what all the others wait for. So beside decodes prompts get no more tokens than this node computes
within `scheduler.step_target_ms`, by what its last steps took.
"""

from __future__ import annotations

import math

# Prompts go on, also where the decodes alone take as long as the target. On a CPU reading the weights takes about as
# long as computing so many tokens with them: fewer would save little time, and cost most of the speed.
FEWEST_TOKENS = 64


class Pace:
    def __init__(self, target_ms: float) -> None:
        """0: no target."""
        self._target_s = target_ms / 1000
        self.tokens: float = math.inf  # until a step has taken longer than the target

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts.

        Part of its time did not grow with them, so what fits by proportion is too few where the step was shorter than
        the target, and too many where it was longer: either way nearer. Only a step that was short although it had all
        the tokens that it might have, or that was too long, says that fewer fit than was thought.
        """
        if not self._target_s or seconds <= 0:
            return
        fitting = max(int(num_tokens * self._target_s / seconds), FEWEST_TOKENS)
        if num_tokens >= self.tokens or seconds > self._target_s or fitting > self.tokens:
            self.tokens = fitting
