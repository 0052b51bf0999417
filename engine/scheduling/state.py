"""What the parts of the scheduler share: the requests, the blocks, the plan of a step while it is made, and the numbers of what it has done.

A step gives each decoding request one token, and takes as long as everything that it computes: on a slow core the chunk
of a long prompt is what all the others wait for. So while requests decode, prompts get no more tokens than this node
computes within `scheduler.step_target_ms`, judged by its last steps (`Pace`). Where nothing decodes, prompts wait for each other: the first
may take all of a step, and others share it while it is short.

A step may be left open: the next one is planned before its tokens are known. Each request that gets a token of the open
step then has a placeholder, a token that counts, has its slot, and is fed to the next step on the device. What cannot be
planned with that waits until the step is booked: no request is preempted, and a request whose next token depends on its
last in ways that only the host knows keeps its steps from being left open. The scheduler knows ahead when a request
reaches its length. A stop is found while the next step already runs, whose token for the request is void.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tandem.engine.cache.encoder_cache import EncoderCache
from tandem.engine.cache.manager import KVCacheManager, Tables
from tandem.engine.cache.pool import ResidencyTotals
from tandem.engine.config import SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.drafting import DraftJudge
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.scheduling.pins import Pins
from tandem.engine.scheduling.queue import QueuePolicy, WaitingRequests
from tandem.kvtransfer.base import SchedulerConnector
from tandem.kvtransfer.config import LoadFailurePolicy
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


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1  # what runs goes on, no request is admitted
    PAUSED_ALL = 2  # nothing is computed; transfers and cancellations go on


@dataclasses.dataclass(slots=True)
class SchedulerState:
    """Each unfinished request is in `requests` and in exactly one of `running` and `waiting`; a finished one
    whose blocks its connector still needs is in `held` alone, and one that keeps its blocks for its job's next turn in
    `pins` alone."""

    config: SchedulerConfig
    max_model_len: int  # of this engine: never more than the pool can hold for one request
    policy: QueuePolicy
    cache: KVCacheManager
    connector: SchedulerConnector | None
    load_failure_policy: LoadFailurePolicy
    clock: Callable[[], float]
    waiting: WaitingRequests
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)
    running: list[Request] = dataclasses.field(default_factory=list)  # in order of admission
    held: dict[str, Request] = dataclasses.field(default_factory=dict)
    pins: Pins | None = None  # None: the policy makes none
    encoded: EncoderCache | None = None  # None: the model reads no images
    judge: DraftJudge | None = None  # None: nothing is guessed
    pause: PauseState = PauseState.UNPAUSED
    totals: Totals = dataclasses.field(default_factory=Totals)
    answers: AnswerLengths = dataclasses.field(default_factory=AnswerLengths)
    # The step that was planned last, and the one that runs while the next is planned, if there is one.
    planned: SchedulerOutput | None = None
    open_step: SchedulerOutput | None = None
    # What the runner and the connector's worker half have not been told of yet.
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)
    # The last step could do nothing, and nothing has happened since that would let the next one do more.
    settled: bool = False

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """The content of these blocks is wrong: nothing may begin from it again. What a connector has kept may hold copies
        of it, and what was computed from them."""
        self.cache.uncache(blocks)
        if self.connector is not None:
            self.connector.reset_cache()

    def owners(self) -> Iterator[Request]:
        """Unfinished requests that have blocks: those that run, those that load, those in line that kept their
        KV."""
        yield from self.running
        yield from self.waiting.holders.values()
        for _, request in self.waiting.blocked.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                yield request

    def stats(self) -> SchedulerStats:
        """Costs a walk over all unfinished requests."""
        totals, pool = self.totals, self.cache.pool
        pinned = list(self.pins.by_job.values()) if self.pins is not None else []
        uncomputed = 0
        for request in self.running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                uncomputed += left
        if self.encoded is not None:
            totals.encoder_tokens = self.encoded.encoded_tokens
            totals.encoder_tokens_reused = self.encoded.reused_tokens
            totals.encoder_tokens_received = self.encoded.received_tokens
        return SchedulerStats(
            **totals.values(),
            running=len(self.running),
            waiting=len(self.waiting),
            blocked=len(self.waiting.blocked),
            waiting_tokens=uncomputed + self.waiting.num_uncomputed_tokens,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_usable,
            held_blocks=sum(map(self.cache.num_blocks_of, self.held)),
            held_requests=len(self.held),
            pinned_requests=len(pinned),
            pinned_blocks=sum(self.cache.num_blocks_of_one(pin.request.request_id) for pin in pinned),
            wanted_blocks=self._wanted_blocks(),
            oldest_arrival=min((request.arrival_time for request in self.waiting), default=None)
            if len(self.waiting)
            else None,
            quarantined_blocks=len(pool.quarantined),
        )

    def _wanted_blocks(self) -> int:
        return sum(
            self.cache.num_blocks_until(
                request,
                request.num_tokens
                + self.answers.rest(request.num_output_tokens, request.length_limit - request.num_tokens),
            )
            for request in self.requests.values()
        )


class Eviction(msgspec.Struct, frozen=True):
    """A request lost its blocks."""

    request_id: str
    for_request: str  # whose next tokens needed them, maybe itself; "" when its KV turned out wrong
    blocks: int
    computed: int  # tokens that it computes again


@dataclasses.dataclass(slots=True)
class StepPlan:
    token_budget: int
    prompt_budget: int  # of them, for requests that are more than one token behind and have no drafts
    num_scheduled: dict[str, int] = dataclasses.field(default_factory=dict)  # in order of scheduling
    running: list[Request] = dataclasses.field(default_factory=list)  # ran before this step
    resumed: list[Request] = dataclasses.field(default_factory=list)
    new: list[Request] = dataclasses.field(default_factory=list)
    new_blocks: dict[str, Tables] = dataclasses.field(default_factory=dict)  # of `running`; absent: none
    drafts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    # For the scheduler trace: how each of them lost its blocks, whose KV is fetched from here on, and who was next in line and not
    # admitted for want of what.
    evictions: list[Eviction] = dataclasses.field(default_factory=list)
    loads: list[str] = dataclasses.field(default_factory=list)
    held_back: tuple[str, str] | None = None
    # Something changed that another step could build on, though maybe nothing is computed.
    moved: bool = False
    # A connector wants to be asked again.
    deferred: bool = False
    # See SchedulerOutput.
    begins_loads: bool = False
    reads_loads: bool = False
    ran_short: bool = False

    def num_tokens_of_prompts(self) -> int:
        if sum(self.num_scheduled.values()) == len(self.num_scheduled):
            return 0
        return sum(
            num_tokens
            for request_id, num_tokens in self.num_scheduled.items()
            if num_tokens > 1 and request_id not in self.drafts
        )

    def take_back(self, request: Request) -> int:
        """Undoes what `request`, which ran before, was given in this step; returns how many tokens that was."""
        num_tokens = self.num_scheduled.pop(request.request_id, 0)
        if num_tokens:
            self.running.remove(request)
            self.new_blocks.pop(request.request_id, None)
            self.drafts.pop(request.request_id, None)
        return num_tokens


def leave_open(state: SchedulerState, step: SchedulerOutput) -> bool:
    """See Scheduler.leave_open."""
    if step.ran_short or step.reads_loads or step.spec_token_ids or not step.num_scheduled_tokens:
        return False
    if step.draft_limits:
        return False  # what is guessed follows from its tokens
    if state.judge is not None and any(request.spec_token_ids for request in state.running):
        return False  # the next step may check drafts that this one had no room for
    sampled: list[Request] = []
    for request_id in step.num_scheduled_tokens:
        if request_id in step.void_req_ids:
            continue
        request = state.requests[request_id]
        if request.needs_its_last_token:
            return False
        if request.num_computed_tokens == request.num_tokens and request.pooling is None:
            sampled.append(request)
    for request in sampled:
        request.num_output_placeholders = 1
    state.open_step = step
    return True


def leave_steps(state: SchedulerState, request: Request) -> int:
    """The request ends or is interrupted, and what steps under way compute for it is void, so its placeholder is, too.
    Returns how many of the tokens that count as computed that is."""
    request.num_output_placeholders = 0
    num_tokens = 0
    for step in (state.open_step, state.planned):  # which may be one
        if step is None or request.request_id in step.void_req_ids:
            continue
        if count := step.num_scheduled_tokens.get(request.request_id):
            step.void_req_ids.add(request.request_id)
            num_tokens += count
    return num_tokens


# Prompts go on, also where the decodes alone take as long as the target. On a CPU reading the weights takes about as
# long as computing so many tokens with them: fewer would save little time, and cost most of the speed.
FEWEST_TOKENS = 64
# Where nothing decodes, several prompts share a step of so many times the target.
PROMPTS_ALONE = 4


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
