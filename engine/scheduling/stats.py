"""What the scheduler has done and how full it is, in numbers."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import msgspec

from tandem.engine.cache.pool import ResidencyTotals
from tandem.wire.requests import STEP_TOKEN_BOUNDS


class Totals(ResidencyTotals):
    """What the scheduler has done since it started. A counter that has the name of a field of `NodeCounters` is reported to routers."""

    steps: int = 0
    requests_started: int = 0
    requests_finished: dict[str, int] = msgspec.field(default_factory=dict)  # by finish reason
    queue_seconds: float = 0.0  # from arrival to first admission, summed over requests_admitted
    requests_admitted: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_received: int = 0
    prompt_tokens_loaded: int = 0
    prompt_tokens_looked_up: int = 0
    prompt_tokens_asked: int = 0
    output_tokens: int = 0
    step_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    tokens_scheduled: int = 0
    speculative_steps: int = 0
    speculative_drafted: int = 0
    speculative_accepted: int = 0
    speculative_accepted_at: list[int] = msgspec.field(default_factory=list)  # by position in the draft
    loads_failed: int = 0
    encoder_tokens: int = 0  # tokens of images that the vision tower made
    encoder_tokens_reused: int = 0  # that were there from an earlier request
    encoder_tokens_received: int = 0  # that an encoder node made
    pins_made: int = 0
    pins_met: int = 0  # the next turn came in time, and began as expected
    pins_ended: dict[str, int] = msgspec.field(default_factory=dict)  # by why
    model_errors: int = 0  # requests that the model failed: its logits were no numbers

    def step_of(self, num_tokens: int, steps: int = 1) -> None:
        self.step_tokens[bisect.bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += steps
        self.tokens_scheduled += steps * num_tokens

    def drafts_settled(self, num_drafts: int, num_accepted: int) -> None:
        self.speculative_steps += 1
        self.speculative_drafted += num_drafts
        self.speculative_accepted += num_accepted
        by_position = self.speculative_accepted_at
        by_position.extend([0] * (num_drafts - len(by_position)))
        for position in range(num_accepted):
            by_position[position] += 1

    def values(self) -> dict[str, Any]:
        """A copy that no later step changes."""
        values = msgspec.structs.asdict(self)
        for name in _CONTAINERS:
            values[name] = values[name].copy()
        return values


_CONTAINERS = [
    name for name, value in msgspec.structs.asdict(Totals()).items() if isinstance(value, list | dict)
]


class SchedulerStats(Totals, kw_only=True):
    """A snapshot: the totals, and how things stand now."""

    running: int
    waiting: int  # in line, passed over, or waiting for their KV
    blocked: int  # of these: waiting for their KV or another event
    waiting_tokens: int  # prompt tokens not yet computed, of everything that is queued or running
    free_blocks: int  # cached ones without a user included
    cached_blocks: int  # that a prefix can be found in, used or not
    total_blocks: int  # without the null block
    held_blocks: int  # of finished requests, until the connector lets go of them
    held_requests: int
    pinned_requests: int  # that have ended, and keep their blocks for their job's next turn
    pinned_blocks: int  # that no other request uses
    # Blocks that unfinished requests are expected to take beyond those that they have, those in line included.
    wanted_blocks: int
    oldest_arrival: float | None  # of the requests that wait, by the scheduler's clock
    quarantined_blocks: int  # of failed loads: a peer may still write to them


# Before an answer has ended here, and the least that an answer is expected to go on for.
ASSUMED_ANSWER_TOKENS = 256.0
LEAST_REST_TOKENS = 32
WEIGHT = 0.1  # of the newest answer's length


@dataclasses.dataclass(slots=True)
class AnswerLengths:
    """How long answers are, as far as one can tell from those that have ended."""

    expected: float = ASSUMED_ANSWER_TOKENS
    seen: bool = False

    def ended(self, num_tokens: int) -> None:
        self.expected = (1 - WEIGHT) * self.expected + WEIGHT * num_tokens if self.seen else float(num_tokens)
        self.seen = True

    def rest(self, num_tokens: int, most: int) -> int:
        """How many more an answer of `num_tokens` is expected to get, of which at most `most` can come."""
        return max(0, min(most, max(LEAST_REST_TOKENS, int(self.expected) - num_tokens)))
