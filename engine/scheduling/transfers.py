"""What became of KV transfers: requests that can go on, loads that failed, blocks that can be freed."""

from __future__ import annotations

from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.invalid_blocks import InvalidBlocks
from tandem.engine.scheduling.lifecycle import Lifecycle, failure_of
from tandem.engine.scheduling.results import status_after
from tandem.engine.scheduling.state import SchedulerState
from tandem.kvtransfer.base import ConnectorOutput, Handoff, LoadFailure
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.errors import InternalError, TransferError
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason


class TransferResults:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._invalid_blocks = InvalidBlocks(state, lifecycle)

    def apply(self, output: ConnectorOutput) -> list[TokenChunk]:
        """A running request whose blocks turn out wrong is no longer RUNNING when this returns: what the step
        sampled for it must not be used."""
        state = self._state
        state.settled = False
        updates: list[TokenChunk] = []
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
            # In the order in which the requests ended: what is evicted next must not depend on that of a set.
            for request_id in [held for held in state.held if held in output.finished_sending]:
                self._lifecycle.release(request_id)
        state.cache.end_reads(output.ended_reads)
        # Last: a block may enter and leave quarantine in one output.
        state.cache.end_quarantine(output.released_blocks)
        return updates

    def _quarantine(self, request_id: str, failure: LoadFailure) -> None:
        """Takes the blocks that a peer may still write to from the request, whether it goes on or has ended."""
        state = self._state
        request = state.held.get(request_id) or state.requests.get(request_id)
        if request is None:
            raise InternalError(f"the load of {request_id} failed, and no such request is here")
        valid = failure.valid_tokens
        if request.valid_load_tokens is not None:
            valid = min(valid, request.valid_load_tokens)
        state.cache.quarantine(request, max(valid, request.num_computed_tokens), failure.unsafe_blocks)

    def _loading(self, request_id: str) -> Request | None:
        """The request that waits for this load. One that ended meanwhile only gives its blocks back."""
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
        if handoff.first_token is None and state.cache.checkpoints is not None:
            state.cache.checkpoints.loaded(request, handoff.num_tokens)
        if handoff.first_token is None or handoff.num_tokens < request.num_tokens:
            self._let_run(request)
            return []
        # Nothing of what it has is left to compute: it goes on from the token that its peer sampled.
        update = TokenChunk(
            request.request_id,
            request.num_output_tokens,
            [handoff.first_token],
            cached_tokens=request.num_cached_tokens,
        )
        request.append_output_token(handoff.first_token)
        state.totals.output_tokens += 1
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
        """Why what came can't be what was asked for. The connector verified it; a wrong answer is worth a
        second look."""
        if request.valid_load_tokens is not None:
            return LoadFailure("some of its blocks did not arrive whole", request.valid_load_tokens)
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
            return [failure_of(request, TransferError(f"the prompt's KV did not arrive: {failure.reason}"))]
        found_here = request.num_computed_tokens
        promised = found_here + request.num_external_tokens
        valid = min(failure.valid_tokens, promised, request.num_tokens - 1)
        if request.valid_load_tokens is not None:
            valid = min(valid, request.valid_load_tokens)
        valid = max(valid, found_here)
        state.cache.rewind(request, valid)
        if request.num_computed_tokens:
            state.cache.cache_loaded(request)
            state.totals.prompt_tokens_received += _of_prompt(request, found_here, valid)
        request.num_external_tokens = max(request.num_computed_tokens - found_here, 0)
        self._let_run(request)
        return []

    def _count_received(self, request: Request, handoff: Handoff) -> None:
        """What a cache had kept counts as cached: the request had not to wait for anyone to compute it."""
        totals = self._state.totals
        count = _of_prompt(request, request.num_computed_tokens, handoff.num_tokens)
        if handoff.first_token is not None:
            totals.prompt_tokens_received += count
            return
        totals.prompt_tokens_loaded += count
        if not request.num_preemptions:
            request.num_cached_tokens += count

    def _let_run(self, request: Request) -> None:
        """Back in line; the runner may know it from before."""
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self._state.waiting.wake(request)


def _of_prompt(request: Request, start: int, end: int) -> int:
    return max(min(end, request.num_prompt_tokens) - start, 0)
