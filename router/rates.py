"""What the router measures: nodes' rates, the length of answers, and averages such as the handover's."""

from __future__ import annotations

import msgspec

from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, NodeStatus

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
    base: NodeCounters | None = None  # where the present window of steps begins
    line_base: NodeCounters | None = None  # where the present window with waiting prompts begins

    def on_status(self, status: NodeStatus) -> None:
        counters = status.counters
        if status.waiting_tokens:
            self._on_line(counters)
        else:
            self.line_base = None
        base = self.base
        if base is None:
            self.base = counters
            return
        steps = counters.steps - base.steps
        if steps == 0:
            return
        seconds = counters.step_seconds - base.step_seconds
        prompt_tokens = counters.prompt_tokens_computed - base.prompt_tokens_computed
        if status.role is _PREFILL:
            if prompt_tokens >= MIN_PROMPT_TOKENS and seconds > 0:
                self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, prompt_tokens / seconds)
                self.base = counters
        elif steps >= MIN_STEPS and seconds > 0:
            if prompt_tokens == 0:
                self.step_s = _mixed(self.step_s, seconds / steps)
            self.base = counters

    def _on_line(self, counters: NodeCounters) -> None:
        """Measures the line's rate while prompts wait."""
        base = self.line_base
        if base is None:
            self.line_base = counters
            return
        tokens = counters.prompt_tokens_computed - base.prompt_tokens_computed
        seconds = counters.step_seconds - base.step_seconds
        if tokens >= MIN_PROMPT_TOKENS and seconds > 0:
            self.line_tokens_per_s = _mixed(self.line_tokens_per_s, tokens / seconds)
            self.line_base = counters

    def on_local_prefill(self, tokens: int, seconds: float) -> None:
        """A node computed a prompt itself, with no other request waiting, and gave the first token after
        `seconds`."""
        if tokens >= MIN_PROMPT_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, tokens / seconds)
