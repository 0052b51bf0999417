"""What the model made of a step: tokens join their requests, drafts are settled, requests end."""

from __future__ import annotations

from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.lifecycle import Lifecycle, failure_of
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.state import SchedulerState
from tandem.engine.scheduling.step import leave_steps
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.errors import InternalError, InvalidImage, InvalidLogits, TandemError
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import RepetitionDetection

_RUNNING = RequestStatus.RUNNING


class ModelResults:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def apply(self, step: SchedulerOutput, output: ModelOutput) -> list[TokenChunk]:
        """Requests that ended or were interrupted since the step was planned get nothing of it."""
        state = self._state
        requests, void, drafts = state.requests, step.void_req_ids, step.spec_token_ids
        logprobs, prompt_logprobs = output.logprobs, output.prompt_logprobs
        updates = [
            self._fail(request, error)
            for request_id, error in output.errors.items()
            if request_id not in void and (request := requests.get(request_id)) is not None
        ]
        ended = bool(updates)
        num_tokens = 0
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
                    or request.sampling.repetition_detection is not None
                ):
                    status = status_after(request, token)
                if drafts and request_id in drafts:
                    self._settle_drafts(request, len(drafts[request_id]), 0)
            else:
                self._settle_drafts(request, len(drafts.get(request_id, ())), len(tokens) - 1)
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
        for request_id, vector in output.vectors.items():
            request = requests.get(request_id)
            if request is None or request_id in void:
                continue
            update = TokenChunk(request_id, 0, [], vector=vector, cached_tokens=request.num_cached_tokens)
            update.queue_s = request.queue_seconds
            self._end(request, RequestStatus.FINISHED_STOPPED, update)
            ended = True
            updates.append(update)
        state.totals.output_tokens += num_tokens
        if ended:
            state.running = [request for request in state.running if request.status is _RUNNING]
        for request_id, of_prompt in prompt_logprobs.items():
            # A request that moved here may have tokens to compute between its prompt and its next token.
            if (
                request_id not in output.sampled_token_ids
                and (request := requests.get(request_id)) is not None
            ):
                updates.append(
                    TokenChunk(request_id, request.num_output_tokens, [], prompt_logprobs=of_prompt)
                )
        if state.judge is not None and step.draft_limits:
            state.judge.searched(
                step.draft_limits, output.draft_token_ids, requests, output.drafting_s, output.guess_s
            )
        for request_id, proposal in output.draft_token_ids.items():
            request = requests.get(request_id)
            if request is not None and request.status is _RUNNING:
                request.spec_token_ids = proposal
        return updates

    def _settle_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The step counted all drafts as computed. The KV of those that were rejected is void, and so are the
        places that were kept for their successors. Recurrent states are those before the first draft, so there all of
        them are computed again, as known tokens."""
        num_rejected = num_drafts - num_accepted
        if num_rejected < 0:
            raise InternalError(
                f"{num_accepted} drafts of {request!r} were accepted where {num_drafts} were given"
            )
        request.num_computed_tokens -= num_drafts if self._state.cache.keeps_states else num_rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected
        if num_drafts:
            self._state.totals.drafts_settled(num_drafts, num_accepted)
            if self._state.judge is not None:
                self._state.judge.settled(request, num_drafts, num_accepted)

    def _fail(self, request: Request, error: TandemError) -> TokenChunk:
        state = self._state
        if isinstance(error, InvalidLogits | InvalidImage):
            state.totals.model_errors += isinstance(error, InvalidLogits)
            # Whatever spoilt it may lie in its KV. No other request may begin from that.
            tables = state.cache.block_ids(request.request_id)
            state.forget_blocks({block for table in tables for block in table if block != NULL_BLOCK_ID})
            # The connector is asked about its blocks, and must not take for computed what is wrong.
            leave_steps(state, request)
            request.num_computed_tokens = 0
        self._lifecycle.end(request, RequestStatus.FINISHED_ERROR)
        return failure_of(request, error)

    def _end(self, request: Request, status: RequestStatus, update: TokenChunk) -> None:
        self._lifecycle.end(request, status)
        update.finish = request.finish_reason
        update.preemptions = request.num_preemptions
        if status is RequestStatus.FINISHED_STOPPED and update.token_ids:
            update.stop_token = update.token_ids[-1]


def _append_until_end(request: Request, tokens: list[int]) -> tuple[list[int], RequestStatus | None]:
    """The tokens that the request keeps: what was sampled after its end does not exist."""
    for count, token in enumerate(tokens, 1):
        request.append_output_token(token)
        status = status_after(request, token)
        if status is not None:
            return tokens[:count], status
    return tokens, None


def status_after(request: Request, token: int) -> RequestStatus | None:
    """How `token`, the newest of the request's tokens, ends it; None when it goes on. A stop token and a repetition count
    only after `min_tokens`, and a stop token before the length: a request that ends on its last possible token with a stop
    has stopped."""
    if token in request.stop_token_ids and request.num_output_tokens >= request.sampling.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.length_limit:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    wanted = request.sampling.repetition_detection
    if (
        wanted is not None
        and request.num_output_tokens >= request.sampling.min_tokens
        and repeats(request.all_token_ids, request.num_output_tokens, wanted)
    ):
        return RequestStatus.FINISHED_REPETITION
    return None


def repeats(tokens: list[int], num_output: int, wanted: RepetitionDetection) -> bool:
    """Whether the last of `num_output` tokens at the end of `tokens` are one pattern, `min_count` times. It looks at tokens alone, so that another
    node that goes on with them finds the same."""
    newest, count = tokens[-1], wanted.min_count
    for size in range(wanted.min_pattern_size, min(wanted.max_pattern_size, num_output // count) + 1):
        if tokens[-1 - size] == newest:
            span = size * (count - 1)
            if tokens[-span:] == tokens[-span - size : -size]:
                return True
    return False
