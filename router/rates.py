"""What the router measures: nodes' rates, the length of answers, and averages such as the handover's."""

from __future__ import annotations

import msgspec

from tandem.wire.nodes import Role
from tandem.wire.requests import NodeStatus

# A window with fewer prompt tokens shows a step's fixed cost rather than the rate.
MIN_PROMPT_TOKENS = 64
MIN_STEPS = 4
WEIGHT = 0.3  # the weight of the newest observation
_PREFILL = Role.PREFILL  # looked up once instead of with every status


class Average:
    """An exponentially weighted average; None before the first observation."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        self.value = _mixed(self.value, value)


def _mixed(average: float | None, value: float) -> float:
    return value if average is None else (1 - WEIGHT) * average + WEIGHT * value


# The expected length before any answer has ended here, and the least expected length.
ASSUMED_ANSWER_TOKENS = 256
LEAST_ANSWER_TOKENS = 32


class AnswerLengthMeter:
    """The expected length of an answer, from those that have ended."""

    def __init__(self) -> None:
        self._average = Average()

    def ended(self, tokens: int) -> None:
        self._average.observe(tokens)

    def expected(self, most: int) -> int:
        average = self._average.value
        return min(most, ASSUMED_ANSWER_TOKENS if average is None else max(LEAST_ANSWER_TOKENS, int(average)))


class NodeRates(msgspec.Struct, gc=False):
    """Rates of one incarnation of a node, from the counters that it reports and from requests. Each is None
    until measured.

    A prefill node's steps hold only prompts, so its counters give its rate. A decode node's steps mix prompts
    with the next tokens of running requests, so its rate is only measured by requests whose prompt it
    computed itself.
    """

    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    # Prompt tokens per second while prompts waited, with the node's other work included.
    line_tokens_per_s: float | None = None
    # The counters with which the present window of steps began, and those with which the present window with
    # waiting prompts began. Negative: there is no window yet.
    steps: int = -1
    seconds: float = 0.0
    tokens: int = 0
    line_seconds: float = -1.0
    line_tokens: int = 0

    def on_status(self, status: NodeStatus) -> None:
        counters = status.counters
        steps, seconds, tokens = counters.steps, counters.step_seconds, counters.prompt_tokens_computed
        if status.waiting_tokens:
            self._on_line(seconds, tokens)
        else:
            self.line_seconds = -1.0
        more_steps = steps - self.steps
        if more_steps == 0:
            return
        if self.steps >= 0:
            more_seconds, more_tokens = seconds - self.seconds, tokens - self.tokens
            if more_seconds <= 0:
                return
            if status.role is _PREFILL:
                if more_tokens < MIN_PROMPT_TOKENS:
                    return
                self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, more_tokens / more_seconds)
            elif more_steps < MIN_STEPS:
                return
            elif more_tokens == 0:
                self.step_s = _mixed(self.step_s, more_seconds / more_steps)
        self.steps, self.seconds, self.tokens = steps, seconds, tokens

    def _on_line(self, seconds: float, tokens: int) -> None:
        """Measures the line's rate while prompts wait."""
        if self.line_seconds >= 0:
            more_seconds, more_tokens = seconds - self.line_seconds, tokens - self.line_tokens
            if more_tokens < MIN_PROMPT_TOKENS or more_seconds <= 0:
                return
            self.line_tokens_per_s = _mixed(self.line_tokens_per_s, more_tokens / more_seconds)
        self.line_seconds, self.line_tokens = seconds, tokens

    def on_local_prefill(self, tokens: int, seconds: float) -> None:
        """A node computed a prompt itself, with no other request waiting, and gave the first token after
        `seconds`."""
        if tokens >= MIN_PROMPT_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, tokens / seconds)
