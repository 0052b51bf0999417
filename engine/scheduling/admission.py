"""The two phases of planning a step: running requests get tokens in order of admission, then waiting requests are admitted
while budget, blocks and `max_num_seqs` allow it. A request gets all the blocks for its tokens, or none."""

from __future__ import annotations

import dataclasses
import enum

from tandem.engine.cache.manager import Tables
from tandem.engine.config import Reserve
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.lifecycle import Lifecycle
from tandem.engine.scheduling.state import Eviction, SchedulerState, StepPlan


class RunningPhase:
    """Gives tokens to running requests, and preempts some when blocks run out."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        # How many tokens a decoding request may be behind without counting as a prompt. With recurrent states, accepted
        # drafts are computed again.
        again = state.config.num_speculative_tokens if state.cache.keeps_states else 0
        self._most_again = again + 1 if again else 0

    def plan(self, step: StepPlan) -> None:
        """Most running requests need one token and have a slot for it. The loop handles them with a few comparisons."""
        running = self._state.running
        scheduled, num_scheduled = step.running, step.num_scheduled
        token_budget = step.token_budget
        encoded = self._state.encoded
        index = 0
        while index < len(running) and token_budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_tokens = request.num_tokens
            if request.num_output_placeholders:
                num_tokens += request.num_output_placeholders
                if num_tokens >= request.length_limit:
                    index += 1  # its last token is already being computed
                    continue
            num_new = num_tokens - num_computed
            if num_new != 1 or request.spec_token_ids:
                num_new = self._cap(request, num_new, token_budget, step)
                if num_new <= 0:
                    index += 1
                    continue
                if not request.spec_token_ids and num_new > self._most_again:
                    step.prompt_budget -= num_new
            elif encoded is not None and request.has_images and not encoded.cap(request, num_computed, 1):
                index += 1
                continue
            if num_computed + num_new > request.allocation_horizon:
                blocks, index, regained = self._allocate(request, num_new, index, step)
                token_budget += regained
                if blocks is None:
                    break
                if any(blocks):
                    step.new_blocks[request.request_id] = blocks
            if encoded is not None and request.has_images:
                encoded.take(request, num_computed, num_new)
            if request.spec_token_ids:
                self._pack_drafts(request, num_new, step)
            num_scheduled[request.request_id] = num_new
            scheduled.append(request)
            token_budget -= num_new
            index += 1
        step.token_budget = token_budget

    def _cap(self, request: Request, num_new: int, token_budget: int, step: StepPlan) -> int:
        if request.spec_token_ids:
            num_new += len(request.spec_token_ids)
        elif num_new > self._most_again:
            num_new = step.tokens_of_prompt(num_new)
        threshold = self._state.config.long_prefill_token_threshold
        if 0 < threshold < num_new:
            num_new = threshold
        if self._state.cache.checkpoints is not None:
            num_new = self._state.cache.checkpoints.cap(request, request.num_computed_tokens, num_new)
        # A token at the last position of the context is never computed, because no token can follow it. A request for a
        # vector computes it.
        room = self._state.max_model_len - (request.facts.pooling is None) - request.num_computed_tokens
        num_new = min(num_new, token_budget, room)
        if self._state.encoded is not None and request.has_images:
            num_new = self._state.encoded.cap(request, request.num_computed_tokens, num_new)
        return num_new

    def _allocate(self, request: Request, num_new: int, index: int, step: StepPlan) -> tuple[Tables | None, int, int]:
        """Allocates blocks for the request, and preempts others while there are too few.

        Returns (blocks, index, regained): `index` is the request's place in `running` now that the victims have left it,
        `regained` the tokens that the victims had been given in this step. Blocks are None when the request was preempted
        itself, or when none may be preempted because a step is open; both end the phase."""
        state, regained = self._state, 0
        while True:
            blocks = state.cache.extend_slots(request, num_new)
            if blocks is not None:
                return blocks, index, regained
            if state.open_step is not None:
                # The open step may end a request and free its blocks, so no request is preempted before it is booked.
                step.ran_short = True
                return None, index, regained
            if self._lifecycle.take_blocks_of_idle_work(request, step):
                continue
            victim_index = state.policy.victim(state.running)
            victim = state.running[victim_index]
            if (
                state.pins is not None
                and (victim is request or state.pins.has(victim.facts.job_id))
                and state.pins.give_way(victim.facts.job_id)
            ):
                continue
            if victim is request and self._lifecycle.take_blocks_of_waiting(besides=request):
                # Preempting the request itself would not help: waiting requests hold the blocks that it needs, and they
                # wait for it.
                continue
            del state.running[victim_index]
            if victim_index < index:
                index -= 1
                regained += step.take_back(victim)
            step.evictions.append(
                Eviction(
                    victim.request_id,
                    request.request_id,
                    state.cache.num_blocks_of(victim.request_id),
                    victim.num_computed_tokens,
                )
            )
            self._lifecycle.preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return None, index, regained

    def _pack_drafts(self, request: Request, num_new: int, step: StepPlan) -> None:
        """Moves the drafts that got a slot into the step. The caps may have cut off the last ones, which are dropped."""
        room = num_new + request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
        if room > 0:
            step.drafts[request.request_id] = request.spec_token_ids[:room]
            if request.drafts_are_forced:
                step.forced.add(request.request_id)
        request.spec_token_ids = []


@dataclasses.dataclass(slots=True)
class _Prefix:
    """The part of a request that this node need not compute: found in the prefix cache, or loaded by the connector."""

    hits: Tables | None  # None: the request already has its blocks
    num_hit_tokens: int
    num_external_tokens: int = 0
    asked_outside: bool = False  # the connector was asked for external tokens
    arrives_later: bool = False  # the external tokens are loaded asynchronously


class _Verdict(enum.Enum):
    ADMITTED = enum.auto()
    NEXT = enum.auto()  # not admitted; the next request may be
    FULL = enum.auto()  # not admitted, and no later request may be in this step


class AdmissionPhase:
    """Admits waiting requests, and begins loads of their KV."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def plan(self, step: StepPlan) -> None:
        state = self._state
        loras: set[str] = set()
        if state.config.max_loras:
            # Running requests without tokens in this step count too: they may have some in the next.
            loras = {request.lora for request in state.running if request.lora is not None}
        while step.token_budget > 0 and len(state.running) < state.config.max_num_seqs:
            request = state.waiting.head()
            if request is None or (step.has_kept and not step.quick):
                break
            if request.facts.when_idle and state.idle_work.yields:
                state.waiting.pass_over(request)
                continue
            may_go = not step.has_kept or request.request_id in step.quick
            step.quick.discard(request.request_id)
            if not may_go or not self._has_room_for_lora(request, loras):
                state.waiting.pass_over(request)
                continue
            verdict = self._consider(request, step)
            if verdict is _Verdict.FULL:
                break
            if verdict is _Verdict.ADMITTED and request.lora is not None:
                loras.add(request.lora)
        state.waiting.end_step()

    def _has_room_for_lora(self, request: Request, loras: set[str]) -> bool:
        most = self._state.config.max_loras
        return not most or request.lora is None or request.lora in loras or len(loras) < most

    def _consider(self, request: Request, step: StepPlan) -> _Verdict:
        prefix = self._find_prefix(request)
        if prefix is None:
            self._state.waiting.pass_over(request)
            step.deferred = True
            return _Verdict.NEXT
        if self._state.watcher is not None and prefix.hits is not None:
            self._state.watcher.looked_up(
                self._state,
                request,
                prefix.num_hit_tokens,
                prefix.num_external_tokens,
                arrives_later=prefix.arrives_later,
            )
        if prefix.arrives_later:
            return self._load(request, prefix, step)
        return self._admit(request, prefix, step)

    def _find_prefix(self, request: Request) -> _Prefix | None:
        """Returns None when the connector cannot say yet how many tokens it can load."""
        if request.num_computed_tokens > 0:
            return _Prefix(None, 0)
        state = self._state
        hits, num_hit = state.cache.find_prefix(request)
        prefix = _Prefix(hits, num_hit)
        if state.connector is None or request.lost_load:
            return prefix
        prefix.asked_outside = True
        num_external, arrives_later = state.connector.get_num_new_matched_tokens(request, num_hit)
        if num_external is None:
            return None
        # A load that arrives later may bring the next token from a prefill node. Otherwise at least one token must be
        # computed here, or there are no logits to sample from.
        most = request.num_tokens - num_hit - (0 if arrives_later else 1)
        prefix.num_external_tokens = max(min(num_external, most), 0)
        prefix.arrives_later = arrives_later and prefix.num_external_tokens > 0
        return prefix

    def _load(self, request: Request, prefix: _Prefix, step: StepPlan) -> _Verdict:
        """Reserves blocks for KV that arrives later. They enter the prefix cache only when it has arrived."""
        if not self._allocate(request, 0, prefix, step):
            step.held_back = (request.request_id, "too few free blocks for the KV that is on its way")
            return _Verdict.FULL
        state = self._state
        step.loads.append(request.request_id)
        state.waiting.block(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = prefix.num_hit_tokens
        request.valid_load_tokens = None
        request.makes_up_load = False
        self._note_prefix(request, prefix)
        self._tell_connector(request, prefix)
        step.moved = step.begins_loads = True
        return _Verdict.NEXT

    def _admit(self, request: Request, prefix: _Prefix, step: StepPlan) -> _Verdict:
        state, config = self._state, self._state.config
        num_computed = request.num_computed_tokens + prefix.num_hit_tokens + prefix.num_external_tokens
        # `num_tokens`, not the prompt's: a preempted request computes its sampled tokens again, too.
        num_new = request.num_tokens - num_computed
        if 0 < config.long_prefill_token_threshold < num_new:
            num_new = config.long_prefill_token_threshold
        checkpoints = state.cache.checkpoints
        if checkpoints is not None:
            if prefix.hits is not None:
                checkpoints.begin(request, num_computed)
            num_new = checkpoints.cap(request, num_computed, num_new)
        budget = step.token_budget if num_new == 1 else min(step.token_budget, step.prompt_budget)
        if num_new > budget:
            if not (budget and config.chunked_prefill):
                step.held_back = (request.request_id, "no prompt tokens are left in this step")
                return _Verdict.FULL
            num_new = budget
        if state.encoded is not None and request.has_images:
            encodable = state.encoded.cap(request, num_computed, num_new)
            if encodable < num_new and not (encodable and config.chunked_prefill):
                if state.encoded.awaits(request, num_computed + encodable):
                    state.waiting.pass_over(request)
                    return _Verdict.NEXT
                step.held_back = (request.request_id, "no images can be encoded in this step")
                return _Verdict.FULL
            num_new = encodable
        if not self._allocate(request, num_new, prefix, step):
            step.held_back = (request.request_id, "too few free blocks")
            return _Verdict.FULL

        if state.encoded is not None and request.has_images:
            state.encoded.take(request, num_computed, num_new)
        state.waiting.take(request)
        state.running.append(request)
        (step.resumed if request.status is RequestStatus.PREEMPTED else step.new).append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        step.num_scheduled[request.request_id] = num_new
        step.token_budget -= num_new
        if num_new > 1:
            step.prompt_budget -= num_new
        if prefix.hits is not None:
            self._note_prefix(request, prefix)
            if prefix.num_external_tokens:
                step.begins_loads = step.reads_loads = True
            received = min(num_computed, request.num_prompt_tokens) - prefix.num_hit_tokens
            if prefix.num_external_tokens and received > 0:
                state.totals.prompt_tokens_received += received
        self._tell_connector(request, prefix)
        return _Verdict.ADMITTED

    def _note_prefix(self, request: Request, prefix: _Prefix) -> None:
        request.num_external_tokens = prefix.num_external_tokens
        if request.num_cached_tokens < 0:
            totals = self._state.totals
            request.num_cached_tokens = min(prefix.num_hit_tokens, request.num_prompt_tokens)
            totals.prompt_tokens_looked_up += request.num_prompt_tokens
            totals.prompt_tokens_cached += request.num_cached_tokens
            if prefix.asked_outside:
                totals.prompt_tokens_asked += request.num_prompt_tokens - request.num_cached_tokens
            totals.requests_admitted += 1
            request.queue_seconds = max(self._state.clock() - request.arrival_time, 0.0)
            totals.queue_seconds += request.queue_seconds

    def _tell_connector(self, request: Request, prefix: _Prefix) -> None:
        connector = self._state.connector
        if connector is not None:
            blocks = self._state.cache.block_ids(request.request_id)
            connector.update_state_after_alloc(request, blocks, prefix.num_external_tokens)

    def _allocate(self, request: Request, num_new: int, prefix: _Prefix, step: StepPlan) -> bool:
        while not self._try_allocate(request, num_new, prefix):
            # While a request runs, it will free blocks. When none runs, waiting requests may hold the blocks that the head
            # needs, while each waits for another. So pinned turns lose their blocks first, then the least urgent waiting
            # request.
            if self._lifecycle.take_blocks_of_idle_work(request, step):
                continue
            if self._state.running:
                return False
            if (pins := self._state.pins) is not None and pins.give_way(request.facts.job_id):
                step.moved = True
                continue
            if not self._lifecycle.take_blocks_of_waiting(besides=request):
                return self._is_alone(request) and self._take_blocks(request, num_new, prefix)
            step.moved = True
        return True

    def _is_alone(self, request: Request) -> bool:
        """No other request holds blocks that it could free, so a request that waited for more free blocks would wait forever."""
        return not self._state.held and all(owner is request for owner in self._state.owners())

    def _try_allocate(self, request: Request, num_new: int, prefix: _Prefix) -> bool:
        return self._can_reserve(request, prefix) and self._take_blocks(request, num_new, prefix)

    def _take_blocks(self, request: Request, num_new: int, prefix: _Prefix) -> bool:
        cache = self._state.cache
        if prefix.hits is None:
            return cache.extend_slots(request, num_new) is not None
        blocks = cache.allocate_slots(
            request,
            num_new,
            hits=prefix.hits,
            num_hit_tokens=prefix.num_hit_tokens,
            num_external_tokens=prefix.num_external_tokens,
            delay_caching=prefix.arrives_later,
        )
        return blocks is not None

    def _can_reserve(self, request: Request, prefix: _Prefix) -> bool:
        """Whether enough blocks are free for `scheduler.reserve`: none beyond the next step, the whole prompt, or all that this
        and the other admitted requests may still grow to."""
        state = self._state
        if state.config.reserve is Reserve.NONE:
            return True
        if state.config.reserve is Reserve.PROMPT:
            computed = request.num_computed_tokens + prefix.num_hit_tokens + prefix.num_external_tokens
            needed = state.cache.num_blocks_of_prompt(request, prefix.hits, computed)
            return needed <= state.cache.pool.num_free
        ahead = state.cache.num_blocks_ahead(request, prefix.hits)
        ahead += sum(state.cache.num_blocks_ahead(other) for other in state.owners() if other is not request)
        return ahead <= state.cache.pool.num_free
