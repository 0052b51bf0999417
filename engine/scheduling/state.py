"""The state that the parts of the scheduler share: requests, blocks, the plan of the step being made, and counters.

The open step. A step may be left open: the scheduler plans the next one before it knows the open step's tokens. Each request
that the open step samples a token for gets a placeholder, which counts as a token and has a slot; the next step reads the
token itself on the device. Whatever needs the token on the host waits until the open step is booked: no request is preempted
before, and a step with a request that samples by its history is never left open. The scheduler knows in advance when a
request reaches its length limit. It finds a stop token only when the next step already runs; that step's token for the
request is void.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from tandem.engine.cache.manager import KVCacheManager, Tables
from tandem.engine.cache.pool import ResidencyTotals
from tandem.engine.config import SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.idle_work import IdleWork
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.parts import DraftLimits, EncodedImages, TurnPins
from tandem.engine.scheduling.queue import QueuePolicy, WaitingRequests
from tandem.kvtransfer.base import SchedulerConnector
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.requests import STEP_TOKEN_BOUNDS


class Totals(ResidencyTotals):
    """Counters since the scheduler started. Those whose names are fields of `NodeCounters` are reported to routers."""

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
    decode_steps: int = 0  # that computed no prompt, without those of idle work
    decode_seconds: float = 0.0  # how long the model needed for these
    idle_steps: int = 0  # of what runs when nothing else does, such as the lines of batches
    idle_seconds: float = 0.0
    idle_tokens_read: int = 0  # of prompts
    idle_tokens_written: int = 0  # of output_tokens
    step_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    tokens_scheduled: int = 0
    context_read: int = 0  # tokens whose KV each step read for its requests, all together
    pairs_read: int = 0  # the same for each of the tokens that it computed
    grammar_tokens_forced: int = 0  # tokens of answers that a grammar forced, and that took no step of their own
    speculative_steps: int = 0
    speculative_drafted: int = 0
    speculative_accepted: int = 0
    speculative_accepted_at: list[int] = msgspec.field(default_factory=list)  # by position in the draft
    loads_failed: int = 0
    encoder_tokens: int = 0  # image tokens that the vision tower here made
    encoder_tokens_reused: int = 0  # image tokens whose rows were kept from an earlier request
    encoder_tokens_received: int = 0  # image tokens that an encoder node made
    pins_made: int = 0
    pins_met: int = 0  # pinned turns whose next turn came in time and continued them
    pins_ended: dict[str, int] = msgspec.field(default_factory=dict)  # by reason
    model_errors: int = 0  # requests that failed because their logits were not finite
    cache_generation: int = 0  # how often everything cached was given up, because some of it may be wrong
    client_errors: int = 0  # failed requests that their clients' input, deadline or cancellation explains

    def step_of(self, num_tokens: int, steps: int = 1) -> None:
        self.step_tokens[bisect.bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += steps
        self.tokens_scheduled += steps * num_tokens

    def decoded(self, steps: int, seconds: float) -> None:
        self.decode_steps += steps
        self.decode_seconds += seconds

    def worked_idle(self, steps: int, seconds: float, read: int) -> None:
        """Steps of idle work, which read so many tokens together."""
        self.idle_steps += steps
        self.idle_seconds += seconds
        self.idle_tokens_read += read

    def wrote(self, num_tokens: int, *, is_idle: bool) -> None:
        self.output_tokens += num_tokens
        if is_idle:
            self.idle_tokens_written += num_tokens

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


_CONTAINERS = [name for name, value in msgspec.structs.asdict(Totals()).items() if isinstance(value, list | dict)]


class SchedulerStats(Totals, kw_only=True):
    """A snapshot: the totals, and the current gauges."""

    running: int = 0
    waiting: int = 0  # requests in line, passed over, or blocked
    blocked: int = 0  # those of `waiting` that wait for their KV or another event
    waiting_tokens: int = 0  # tokens left to compute, of all queued requests and of running prompts
    free_blocks: int = 0  # including cached blocks that no request uses
    cached_blocks: int = 0  # blocks in the prefix cache, used or free
    total_blocks: int = 0  # without the null block
    held_blocks: int = 0  # blocks of finished requests that the connector still needs
    held_requests: int = 0
    pinned_requests: int = 0  # ended turns that keep their blocks for their job's next turn
    pinned_blocks: int = 0  # pinned blocks that no other request uses
    idle_blocks: int = 0  # of idle work
    # Blocks that unfinished requests, including waiting ones, are expected to take beyond those that they have.
    wanted_blocks: int = 0
    oldest_arrival: float | None = None  # the earliest of the waiting that are not blocked, by the scheduler's clock
    quarantined_blocks: int = 0  # blocks of failed loads, which a peer may still write to


# The expected length of an answer before one has ended here, and the least that a running answer is expected to go on for.
ASSUMED_ANSWER_TOKENS = 256.0
LEAST_REST_TOKENS = 32
WEIGHT = 0.1  # of the newest answer's length in the average


@dataclasses.dataclass(slots=True)
class AnswerLengths:
    """Predicts how long answers get, from a moving average over those that have ended."""

    expected: float = ASSUMED_ANSWER_TOKENS
    seen: bool = False

    def ended(self, num_tokens: int) -> None:
        self.expected = (1 - WEIGHT) * self.expected + WEIGHT * num_tokens if self.seen else float(num_tokens)
        self.seen = True

    def rest(self, num_tokens: int, most: int) -> int:
        """How many more tokens an answer of `num_tokens` is expected to get; at most `most`."""
        return max(0, min(most, max(LEAST_REST_TOKENS, int(self.expected) - num_tokens)))


class StepWatcher(Protocol):
    """Sees what each step saw and decided. Its calls come in this order, and it changes nothing."""

    def begins(self, state: SchedulerState) -> None: ...

    def snapshot(self, state: SchedulerState) -> None:
        """A step is about to be planned."""

    def looked_up(
        self, state: SchedulerState, request: Request, local: int, external: int, *, arrives_later: bool
    ) -> None:
        """The prefix cache has `local` of the request's tokens, and the connector promises `external` ones."""

    def decided(self, state: SchedulerState, step: StepPlan, finished: set[str], preempted: set[str]) -> None:
        """`preempted` has every request that the runner must forget the blocks of, also those that lost them between two steps."""


@dataclasses.dataclass(slots=True)
class SchedulerState:
    """Each unfinished request is in `requests` and in exactly one of `running`, `waiting` and `idle_work`. A finished request whose blocks
    the connector still needs is only in `held`; one that keeps its blocks for its job's next turn is only in `pins`."""

    config: SchedulerConfig
    max_model_len: int  # never more than the pool can hold for one request
    policy: QueuePolicy
    cache: KVCacheManager
    connector: SchedulerConnector | None
    load_failure_policy: LoadFailurePolicy
    clock: Callable[[], float]
    waiting: WaitingRequests
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)
    running: list[Request] = dataclasses.field(default_factory=list)  # in order of admission
    held: dict[str, Request] = dataclasses.field(default_factory=dict)
    idle_work: IdleWork = dataclasses.field(default_factory=IdleWork)
    pins: TurnPins | None = None  # None: turns are not pinned
    encoded: EncodedImages | None = None  # None: the model reads no images
    judge: DraftLimits | None = None  # None: nothing is guessed
    has_drafts: bool = False  # False: no request has drafts
    watcher: StepWatcher | None = None
    totals: Totals = dataclasses.field(default_factory=Totals)
    answers: AnswerLengths = dataclasses.field(default_factory=AnswerLengths)
    planned: SchedulerOutput | None = None  # the newest step, until it is booked
    open_step: SchedulerOutput | None = None  # the step that computes while the next one is planned
    # Requests to name in the next step's output, so that the runner and the connector's worker half learn of them.
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)
    # The last step did nothing, and nothing has happened since that would let the next one do more.
    settled: bool = False

    def owners(self) -> Iterator[Request]:
        """Unfinished requests that have blocks: those that run, those that load their KV, and those in line that kept it."""
        yield from self.running
        yield from self.idle_work.resting
        yield from self.waiting.holders.values()
        for _, request in self.waiting.blocked.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                yield request

    def stats(self) -> SchedulerStats:
        """Walks over all unfinished requests."""
        totals, pool = self.totals, self.cache.pool
        pinned = self.pins.pinned.values() if self.pins is not None else ()
        uncomputed = 0
        for request in self.running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0 and not request.facts.when_idle:
                uncomputed += left
        if self.encoded is not None:
            totals.encoder_tokens = self.encoded.encoded_tokens
            totals.encoder_tokens_reused = self.encoded.reused_tokens
            totals.encoder_tokens_received = self.encoded.received_tokens
        # Idle work delays no other request, so routers count none of it.
        idle = [one for one in self.waiting if one.facts.when_idle] if self.idle_work.count else []
        in_line = sum(
            one.num_tokens - one.num_computed_tokens for one in idle if one.request_id not in self.waiting.blocked
        )
        blocked = sum(one.request_id in self.waiting.blocked for one in idle)
        return SchedulerStats(
            **totals.values(),
            running=len(self.running)
            - (sum(one.facts.when_idle for one in self.running) if self.idle_work.count else 0),
            waiting=len(self.waiting) - len(idle),
            blocked=len(self.waiting.blocked) - blocked,
            waiting_tokens=uncomputed + self.waiting.num_uncomputed_tokens - in_line,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_usable,
            held_blocks=sum(map(self.cache.num_blocks_of, self.held)),
            held_requests=len(self.held),
            pinned_requests=len(pinned),
            pinned_blocks=sum(self.cache.num_blocks_of_one(request.request_id) for request in pinned),
            idle_blocks=self._blocks_of_idle_work(),
            wanted_blocks=self._wanted_blocks(),
            oldest_arrival=min(
                (one.arrival_time for one in self.waiting.ready() if not one.facts.when_idle), default=None
            ),
            quarantined_blocks=len(pool.quarantined),
        )

    def _blocks_of_idle_work(self) -> int:
        """With those of ended ones whose KV still waits for its consumer: they are given up, too."""
        owners = (*(self.owners() if self.idle_work.count else ()), *self.held.values())
        return sum(self.cache.num_blocks_of(one.request_id) for one in owners if one.facts.when_idle)

    def _wanted_blocks(self) -> int:
        return sum(
            self.cache.num_blocks_until(
                request,
                request.num_tokens
                + self.answers.rest(request.num_output_tokens, request.length_limit - request.num_tokens),
            )
            for request in self.requests.values()
            if not request.facts.when_idle  # which gives way
        )


class Eviction(msgspec.Struct, frozen=True):
    """A request lost its blocks."""

    request_id: str
    for_request: str  # the request that needed the blocks, maybe itself; "" when it was rewound for wrong KV
    blocks: int
    computed: int  # tokens to compute again


# A prompt is quick beside one that lacks so many times as much. It may take at most half of what that one would get, so no
# prompt needs more than twice its steps.
QUICK = 4


@dataclasses.dataclass(slots=True)
class StepPlan:
    """A step while it is being planned. `SchedulerOutput` is made from it."""

    token_budget: int  # tokens left to hand out
    # The part of `token_budget` that requests may use which are more than one token behind and have no drafts.
    prompt_budget: int
    num_scheduled: dict[str, int] = dataclasses.field(default_factory=dict)  # in order of scheduling
    running: list[Request] = dataclasses.field(default_factory=list)  # those that ran before this step
    resumed: list[Request] = dataclasses.field(default_factory=list)
    new: list[Request] = dataclasses.field(default_factory=list)
    # By id, for those of `running` that got any.
    new_blocks: dict[str, Tables] = dataclasses.field(default_factory=dict)
    drafts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    forced: set[str] = dataclasses.field(default_factory=set)  # see SchedulerOutput.forced_req_ids
    preempted: list[Request] = dataclasses.field(default_factory=list)
    # For the scheduler trace.
    evictions: list[Eviction] = dataclasses.field(default_factory=list)
    # Requests whose KV a connector loads from this step on.
    loads: list[str] = dataclasses.field(default_factory=list)
    held_back: tuple[str, str] | None = None  # the first request that was not admitted, and why
    moved: bool = False  # the state changed, maybe without tokens to compute, so another step may do more
    # The connector could not say yet how much it loads, and is asked again in the next step.
    deferred: bool = False
    # As in SchedulerOutput.
    begins_loads: bool = False
    reads_loads: bool = False
    ran_short: bool = False
    # See `beside.py`: what the prompts lack that have not got their tokens yet; the waiting requests that go beside a long one;
    # whether it has left them some.
    lacking: list[int] = dataclasses.field(default_factory=list)
    quick: set[str] = dataclasses.field(default_factory=set)
    has_kept: bool = False

    def tokens_of_prompt(self, lacks: int) -> int:
        """How many tokens of a running prompt may be computed. One that cannot end leaves at most half to quicker ones."""
        budget = self.prompt_budget
        if lacks in self.lacking:
            self.lacking.remove(lacks)
        if lacks <= budget:
            return lacks
        kept = min(budget // 2, sum(other for other in self.lacking if other * QUICK <= lacks))
        self.has_kept = self.has_kept or kept > 0
        return budget - kept

    def num_tokens_of_prompts(self) -> int:
        if sum(self.num_scheduled.values()) == len(self.num_scheduled):
            return 0
        return sum(
            num_tokens
            for request_id, num_tokens in self.num_scheduled.items()
            if num_tokens > 1 and request_id not in self.drafts
        )

    def take_back(self, request: Request) -> int:
        """Removes a request of `running` from the plan; returns how many tokens it had been given."""
        num_tokens = self.num_scheduled.pop(request.request_id, 0)
        if num_tokens:
            self.running.remove(request)
            self.new_blocks.pop(request.request_id, None)
            self.drafts.pop(request.request_id, None)
            self.forced.discard(request.request_id)
        return num_tokens


def take_drafts(state: SchedulerState, output: ModelOutput) -> None:
    """Gives requests their drafts for the next step, and no longer ones than their answers may get."""
    for request_id, proposal in output.draft_token_ids.items():
        request = state.requests.get(request_id)
        if request is not None and request.status is RequestStatus.RUNNING:
            room = request.length_limit - request.num_tokens - 1
            request.spec_token_ids = proposal[: max(room, 0)]
            request.drafts_are_forced = request_id in output.forced_req_ids
            state.has_drafts = True


def drafts_settled(
    state: SchedulerState, step: SchedulerOutput, request: Request, num_drafts: int, num_accepted: int
) -> None:
    """Counts how a request's drafts fared. Those that a grammar forced are no guesses."""
    if request.request_id in step.forced_req_ids:
        state.totals.grammar_tokens_forced += num_accepted
    elif num_drafts:
        state.totals.drafts_settled(num_drafts, num_accepted)
        if state.judge is not None:
            state.judge.settled(request, num_drafts, num_accepted)


# Of steps that only decode one in so many is counted, for all of them, because what they read changes slowly.
READ_EVERY = 16


def count_read(state: SchedulerState, num_scheduled: Mapping[str, int], *, exactly: bool) -> None:
    """Counts what a step reads, whose tokens count as computed already. `exactly`: it computes a prompt."""
    if not exactly and state.totals.steps % READ_EVERY:
        return
    times, context, pairs = 1 if exactly else READ_EVERY, 0, 0
    for request_id, num_tokens in num_scheduled.items():
        end = state.requests[request_id].num_computed_tokens
        context += end
        pairs += num_tokens * end - num_tokens * (num_tokens - 1) // 2
    state.totals.context_read += times * context
    state.totals.pairs_read += times * pairs


def leave_open(state: SchedulerState, step: SchedulerOutput) -> bool:
    """See Scheduler.leave_open."""
    if step.ran_short or step.reads_loads or step.spec_token_ids or not step.num_scheduled_tokens:
        return False
    if state.idle_work.fills_step:
        return False  # a request that comes would wait for the next step, too
    if step.draft_limits:
        return False  # drafts for the next step depend on this step's tokens
    if state.has_drafts:
        state.has_drafts = any(request.spec_token_ids for request in state.running)
        if state.has_drafts:
            return False  # the next step may verify drafts that had no room in this one
    sampled: list[Request] = []
    for request_id in step.num_scheduled_tokens:
        if request_id in step.void_req_ids:
            continue
        request = state.requests[request_id]
        if request.needs_its_last_token:
            return False
        if request.num_computed_tokens == request.num_tokens and request.facts.pooling is None:
            sampled.append(request)
    for request in sampled:
        request.num_output_placeholders = 1
    state.open_step = step
    return True


def leave_steps(state: SchedulerState, request: Request) -> int:
    """The request ends or is interrupted: voids what the unbooked steps compute for it, and its placeholder. Returns how many
    of its tokens count as computed only because of those steps."""
    request.num_output_placeholders = 0
    num_tokens = 0
    for step in (state.open_step, state.planned):  # may be the same step
        if step is None or request.request_id in step.void_req_ids:
            continue
        if count := step.num_scheduled_tokens.get(request.request_id):
            step.void_req_ids.add(request.request_id)
            num_tokens += count
    return num_tokens
