"""Books a step. `ModelResults` appends sampled tokens, settles drafts and ends requests. `TransferResults` handles the
connector's events: loads that arrived or failed, sends that ended, and blocks that can be freed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tandem.base.errors import (
    InternalError,
    InvalidImage,
    InvalidLogits,
    KVLoadFailed,
    RequestError,
    TandemError,
    Unavailable,
)
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.invalid_blocks import InvalidBlocks
from tandem.engine.scheduling.lifecycle import Lifecycle, failure_of
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.state import SchedulerState, drafts_settled, leave_steps, take_drafts
from tandem.kvtransfer.base import ConnectorOutput, Handoff, LoadFailure
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason, RepetitionDetection

logger = logging.getLogger(__name__)

_RUNNING = RequestStatus.RUNNING


class ModelResults:
    """Books the model's output of a step."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._invalid_blocks = InvalidBlocks(state, lifecycle)

    def apply(self, step: SchedulerOutput, output: ModelOutput) -> list[TokenChunk]:
        """Returns the chunks to send. Requests that ended or were interrupted since the step was planned are skipped: what the
        step computed for them is void."""
        state = self._state
        requests, void, drafts = state.requests, step.void_req_ids, step.spec_token_ids
        logprobs, prompt_logprobs = output.logprobs, output.prompt_logprobs
        updates = [
            self._fail(request, error, void)
            for request_id, error in output.errors.items()
            if request_id not in void and (request := requests.get(request_id)) is not None
        ]
        ended = bool(updates)
        num_tokens, is_idle = 0, state.idle_work.fills_step
        for request_id, tokens in output.sampled_token_ids.items():
            request = requests.get(request_id)
            if request is None or request_id in void or not tokens:
                continue
            start = request.num_tokens - request.num_prompt_tokens
            status: RequestStatus | None = None
            if len(tokens) == 1:
                token = tokens[0]
                request.all_token_ids.append(token)
                request.num_tokens += 1
                if request.num_output_placeholders:
                    request.num_output_placeholders -= 1
                if (
                    request.num_tokens >= request.length_limit
                    or token in request.stop_token_ids
                    or request.facts.sampling.repetition_detection is not None
                ):
                    status = status_after(request, token)
                if drafts and request_id in drafts:
                    self._settle_drafts(step, request, 0)
            else:
                self._settle_drafts(step, request, len(tokens) - 1)
                tokens, status = _append_until_end(request, tokens)
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            num_tokens += len(tokens)
            update = TokenChunk(request_id, start, tokens)
            if logprobs and (found := logprobs.get(request_id)) is not None:
                update.logprobs = found[: len(tokens)]
            if prompt_logprobs:
                update.prompt_logprobs = prompt_logprobs.get(request_id)
            if start == request.num_initial_output_tokens:
                update.cached_tokens = request.num_cached_tokens
                update.queue_s = request.queue_seconds
            if status is not None:
                ended = True
                self._end(request, status, update)
            updates.append(update)
        if output.vectors:
            updates += self._ended_by_vectors(output, void)
            ended = True
        state.totals.wrote(num_tokens, is_idle=is_idle)
        if ended:
            state.running = [request for request in state.running if request.status is _RUNNING]
            state.idle_work.drop_ended()
        for request_id, of_prompt in prompt_logprobs.items():
            # A request that moved here from another node has output tokens to compute after its prompt, so a step may finish
            # the prompt and sample no token.
            if (
                request_id not in output.sampled_token_ids
                and request_id not in void
                and (request := requests.get(request_id)) is not None
            ):
                updates.append(TokenChunk(request_id, request.num_output_tokens, [], prompt_logprobs=of_prompt))
        self._take_drafts(step, output)
        return updates

    def _ended_by_vectors(self, output: ModelOutput, void: set[str]) -> Iterator[TokenChunk]:
        for request_id, vector in output.vectors.items():
            request = self._state.requests.get(request_id)
            if request is None or request_id in void:
                continue
            update = TokenChunk(request_id, 0, [], vector=vector, cached_tokens=request.num_cached_tokens)
            update.queue_s = request.queue_seconds
            self._end(request, RequestStatus.FINISHED_STOPPED, update)
            yield update

    def _take_drafts(self, step: SchedulerOutput, output: ModelOutput) -> None:
        requests, judge = self._state.requests, self._state.judge
        if judge is not None and step.draft_limits:
            judge.searched(step.draft_limits, output.draft_token_ids, requests, output.drafting_s, output.guess_s)
        take_drafts(self._state, output)

    def _settle_drafts(self, step: SchedulerOutput, request: Request, num_accepted: int) -> None:
        """Subtracts rejected drafts from the request's counters: the step counted all drafts as computed, and the KV of rejected
        ones is void. Recurrent states stay at the token before the first draft, so with them all drafts are subtracted, and
        accepted ones are computed again as known tokens."""
        num_drafts = len(step.spec_token_ids.get(request.request_id, ()))
        num_rejected = num_drafts - num_accepted
        if num_rejected < 0:
            raise InternalError(f"{num_accepted} drafts of {request!r} were accepted where {num_drafts} were given")
        request.num_computed_tokens -= num_drafts if self._state.cache.keeps_states else num_rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected
        drafts_settled(self._state, step, request, num_drafts, num_accepted)

    def _fail(self, request: Request, error: TandemError, void: set[str]) -> TokenChunk:
        """Adds to `void` the requests that are rewound with this one."""
        if isinstance(error, InvalidLogits | InvalidImage | Unavailable):
            self._state.totals.model_errors += isinstance(error, InvalidLogits)
            self._distrust(request, void)
        self._lifecycle.end(request, RequestStatus.FINISHED_ERROR, error)
        if self._state.encoded is not None and request.has_images and not isinstance(error, RequestError):
            # The next request with these images tries to encode them again.
            self._state.encoded.drop(part.identifier for part in request.image_parts)
        return failure_of(request, error)

    def _distrust(self, request: Request, void: set[str]) -> None:
        """No request may begin from what this one has computed. `end` asks the connector about its blocks, and wrong ones must not
        count as computed."""
        state, own_input = self._state, request.own_input_begins
        leave_steps(state, request)
        if own_input is not None:
            # What the request brought explains the error, so nothing else is in doubt.
            request.num_computed_tokens = min(request.num_computed_tokens, own_input)
            void |= self._invalid_blocks.forget_input(request, own_input)
        else:
            # The cause may lie in the request's KV, and in blocks that it found in the cache.
            request.num_computed_tokens = 0
            self._lifecycle.begin_generation()

    def _end(self, request: Request, status: RequestStatus, update: TokenChunk) -> None:
        self._lifecycle.end(request, status)
        update.finish = request.finish_reason
        update.preemptions = request.num_preemptions
        if status is RequestStatus.FINISHED_STOPPED and update.token_ids:
            update.stop_token = update.token_ids[-1]


def _append_until_end(request: Request, tokens: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Appends sampled tokens up to the one that ends the request, and drops the rest. Returns the appended tokens, and the
    status they end it with."""
    for count, token in enumerate(tokens, 1):
        request.append_output_token(token)
        status = status_after(request, token)
        if status is not None:
            return tokens[:count], status
    return tokens, None


def status_after(request: Request, token: int) -> RequestStatus | None:
    """Returns the status with which `token`, the request's newest, ends it; None when the request goes on. A stop token and a
    repetition count only after `min_tokens`. The stop token is checked before the length, so a stop on the last possible
    token counts as a stop."""
    if token in request.stop_token_ids and request.num_output_tokens >= request.facts.sampling.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.length_limit:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    wanted = request.facts.sampling.repetition_detection
    if (
        wanted is not None
        and request.num_output_tokens >= request.facts.sampling.min_tokens
        and repeats(request.all_token_ids, request.num_output_tokens, wanted)
    ):
        return RequestStatus.FINISHED_REPETITION
    return None


_FEW = 16


def repeats(tokens: list[int], num_output: int, wanted: RepetitionDetection) -> bool:
    """Whether `tokens` ends with one pattern `min_count` times, within its last `num_output` tokens. It depends on the tokens
    alone, so that another node that continues the request decides the same."""
    newest, count = tokens[-1], wanted.min_count
    for size in range(wanted.min_pattern_size, min(wanted.max_pattern_size, num_output // count) + 1):
        if tokens[-1 - size] == newest:
            span = size * (count - 1)
            few = min(span, _FEW)  # of random tokens nearly all differ here, and long ones are not copied
            if tokens[-few:] == tokens[-few - size : -size] and tokens[-span:] == tokens[-span - size : -size]:
                return True
    return False


class TransferResults:
    """Books a connector's events."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._invalid_blocks = InvalidBlocks(state, lifecycle)

    def apply(self, output: ConnectorOutput) -> list[TokenChunk]:
        """Returns the chunks to send. A running request whose blocks turned out wrong is no longer RUNNING afterwards, so that the
        token that the step sampled for it is not used."""
        state = self._state
        state.settled = False
        updates: list[TokenChunk] = []
        if output.distrusted:
            logger.error(
                "the cache begins a new generation, and nothing cached so far is used again: %s", output.distrusted
            )
            self._lifecycle.begin_generation()
        if output.invalid_block_ids:
            updates += self._invalid_blocks.handle(output.invalid_block_ids)
        for request_id, handoff in output.finished_recving.items():
            if (request := self._loading(request_id)) is not None:
                updates += self._received(request, handoff)
        for request_id, failure in output.failed_recving.items():
            if failure.unsafe_blocks:
                self._quarantine(request_id, failure)
            if (request := self._loading(request_id)) is not None:
                updates += self._failed(request, failure)
        for request_id in output.unwanted_sending:
            if (request := state.requests.get(request_id)) is not None:
                updates.append(TokenChunk(request_id, request.num_output_tokens, [], FinishReason.ABORT))
                self._lifecycle.finish_all([request_id], RequestStatus.FINISHED_ABORTED)
        if output.finished_sending:
            # In the order in which the requests ended: the order of eviction must not depend on a set's order.
            for request_id in [held for held in state.held if held in output.finished_sending]:
                self._lifecycle.release(request_id)
        state.cache.end_reads(output.ended_reads)
        # This comes last, because a block may enter and leave quarantine in one output.
        state.cache.end_quarantine(output.released_blocks)
        return updates

    def _quarantine(self, request_id: str, failure: LoadFailure) -> None:
        """Puts the blocks that a peer may still write to into quarantine. The request may go on or have ended; it loses them."""
        state = self._state
        request = state.held.get(request_id) or state.requests.get(request_id)
        if request is None:
            raise InternalError(f"the load of {request_id} failed, and no such request is here")
        valid = failure.valid_tokens
        if request.valid_load_tokens is not None:
            valid = min(valid, request.valid_load_tokens)
        state.cache.quarantine(request, max(valid, request.num_computed_tokens), failure.unsafe_blocks)

    def _loading(self, request_id: str) -> Request | None:
        """Returns the request that waits for this load. A request that has ended since frees its blocks here, and None is
        returned."""
        state = self._state
        if request_id in state.held:
            self._lifecycle.release(request_id)
            return None
        request = state.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        return request

    def _received(self, request: Request, handoff: Handoff) -> list[TokenChunk]:
        failure = self._objection(request, handoff)
        if failure is not None:
            return self._failed(request, failure)
        state = self._state
        self._count_received(request, handoff)
        request.num_computed_tokens = handoff.num_tokens
        state.cache.cache_loaded(request)
        if (checkpoints := state.cache.checkpoints) is not None:
            came = checkpoints.loaded if handoff.first_token is None else checkpoints.handed_over
            came(request, handoff.num_tokens)
        if handoff.first_token is None or handoff.num_tokens < request.num_tokens:
            self._let_run(request)
            return []
        # All its tokens are computed, so it continues with the token that the prefill node sampled.
        update = TokenChunk(
            request.request_id,
            request.num_output_tokens,
            [handoff.first_token],
            cached_tokens=request.num_cached_tokens,
        )
        request.append_output_token(handoff.first_token)
        state.totals.wrote(1, is_idle=request.facts.when_idle)
        status = status_after(request, handoff.first_token)
        if status is None:
            self._let_run(request)
        else:
            self._lifecycle.end(request, status)
            state.waiting.remove(request)
            update.finish = request.finish_reason
            if status is RequestStatus.FINISHED_STOPPED:
                update.stop_token = handoff.first_token
        return [update]

    def _objection(self, request: Request, handoff: Handoff) -> LoadFailure | None:
        """Why the received KV cannot be what was asked for; None if it can. The connector has verified it, but wrong KV would give
        a wrong answer, so the scheduler checks again."""
        if request.valid_load_tokens is not None:
            return LoadFailure(
                "some of its blocks did not arrive whole", request.valid_load_tokens, cached=request.makes_up_load
            )
        promised = request.num_computed_tokens + request.num_external_tokens
        if handoff.num_tokens != promised:
            return LoadFailure(f"KV for {handoff.num_tokens} tokens came where {promised} were asked for")
        if handoff.first_token is None:
            if promised >= request.num_tokens:
                return LoadFailure("the KV of all its tokens came, and no token after them", promised - 1)
        elif promised < request.num_tokens and request.all_token_ids[promised] != handoff.first_token:
            return LoadFailure(f"the token after the first {promised} is another here")
        return None

    def _failed(self, request: Request, failure: LoadFailure) -> list[TokenChunk]:
        state = self._state
        state.totals.loads_failed += 1
        if state.load_failure_policy is LoadFailurePolicy.FAIL and not failure.cached:
            self._lifecycle.end(request, RequestStatus.FINISHED_ERROR)
            state.waiting.remove(request)
            return [failure_of(request, KVLoadFailed(f"the prompt's KV did not arrive: {failure.reason}"))]
        found_here = request.num_computed_tokens
        promised = found_here + request.num_external_tokens
        valid = min(failure.valid_tokens, promised, request.num_tokens - 1)
        if request.valid_load_tokens is not None:
            valid = min(valid, request.valid_load_tokens)
        if request.own_input_begins is not None:
            # An input may fail at the producer after its KV has left, and the producer may end before it can say so. Only a
            # handoff says that the input was right.
            valid = min(valid, request.own_input_begins)
        valid = max(valid, found_here)
        state.cache.rewind(request, valid)
        if request.num_computed_tokens:
            state.cache.cache_loaded(request)
            state.totals.prompt_tokens_received += _of_prompt(request, found_here, valid)
        request.num_external_tokens = max(request.num_computed_tokens - found_here, 0)
        self._let_run(request)
        return []

    def _count_received(self, request: Request, handoff: Handoff) -> None:
        """Counts loaded prompt tokens. Those from a prefill node count as received. Those from a tier count as loaded and as
        cached, because no node computed them for this request."""
        totals = self._state.totals
        count = _of_prompt(request, request.num_computed_tokens, handoff.num_tokens)
        if handoff.first_token is not None:
            totals.prompt_tokens_received += count
            return
        totals.prompt_tokens_loaded += count
        if not request.num_preemptions:
            request.num_cached_tokens += count

    def _let_run(self, request: Request) -> None:
        """Puts a request that waited for KV back in line. PREEMPTED tells the runner that it already knows the request."""
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self._state.waiting.wake(request)


def _of_prompt(request: Request, start: int, end: int) -> int:
    return max(min(end, request.num_prompt_tokens) - start, 0)
