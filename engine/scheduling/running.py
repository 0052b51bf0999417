"""First half of a step: requests that run go on, in order of admission."""

from __future__ import annotations

from tandem.engine.cache.coordinator import Tables
from tandem.engine.request import Request
from tandem.engine.scheduling.lifecycle import Lifecycle
from tandem.engine.scheduling.state import SchedulerState
from tandem.engine.scheduling.step import Eviction, StepPlan


class RunningPhase:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        # Tokens that a running answer may be behind: with recurrent states, drafts that were right are computed again.
        again = state.config.num_speculative_tokens if state.cache.keeps_states else 0
        self._most_again = again + 1 if again else 0

    def plan(self, step: StepPlan) -> None:
        """Most requests need one token and have a slot for it: they cost a few comparisons."""
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
                    index += 1  # the token that it waits for is its last
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
            num_new = min(num_new, step.prompt_budget)
        threshold = self._state.config.long_prefill_token_threshold
        if 0 < threshold < num_new:
            num_new = threshold
        if self._state.cache.checkpoints is not None:
            num_new = self._state.cache.checkpoints.cap(request, request.num_computed_tokens, num_new)
        # The last position of the context is never an input, but for a vector's: no token can follow it.
        room = self._state.max_model_len - (request.pooling is None) - request.num_computed_tokens
        num_new = min(num_new, token_budget, room)
        if self._state.encoded is not None and request.has_images:
            num_new = self._state.encoded.cap(request, request.num_computed_tokens, num_new)
        return num_new

    def _allocate(
        self, request: Request, num_new: int, index: int, step: StepPlan
    ) -> tuple[Tables | None, int, int]:
        """Blocks for the request, preempting others for as long as there are too few; None when it was preempted
        itself, or none may be, which ends the step's first half. Then its index among those that are left, and the tokens that
        victims had been given in this step."""
        state, regained = self._state, 0
        while True:
            blocks = state.cache.extend_slots(request, num_new)
            if blocks is not None:
                return blocks, index, regained
            if state.open_step is not None:
                # The step that runs may end a request. Until that is known, no request loses what it has computed.
                step.ran_short = True
                return None, index, regained
            victim_index = state.policy.victim(state.running)
            victim = state.running[victim_index]
            if (
                state.pins is not None
                and (victim is request or state.pins.has(victim.job_id))
                and self._lifecycle.break_pin(besides=victim.job_id)
            ):
                continue
            if victim is request and self._lifecycle.take_blocks_of_waiting(besides=request):
                # It would only come back, and fail again for the blocks that others hold who wait for it.
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
        """Drafts that got a slot are verified in this step; the caps may have cut off the last of them."""
        room = num_new + request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
        if room > 0:
            step.drafts[request.request_id] = request.spec_token_ids[:room]
        request.spec_token_ids = []
