"""How a request is added, preempted and ended. Only this file frees the blocks of a preempted or ended request, so until then
each of them has an owner."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.base.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestError,
    TandemError,
)
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.state import Eviction, SchedulerState, StepPlan, leave_steps
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.requests import TokenChunk

# A request that was preempted more often than this loads no KV and computes its tokens. Otherwise two requests in a small pool
# could preempt each other forever: each loads its KV into the blocks that the other needs.
MOST_LOADED = 3
_OF_CLIENTS = (RequestError, DeadlineExceeded, Cancelled)  # errors that say nothing about this node
ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Lifecycle:
    """Adds, preempts and ends requests, and frees their blocks."""

    def __init__(self, state: SchedulerState, context: int, eos_token_ids: frozenset[int]) -> None:
        self._state = state
        # The configured context. A longer request is the client's mistake; one that only the cache is too small for is not.
        self._context = context
        self._eos_token_ids = eos_token_ids

    def add(self, request: Request) -> None:
        self._check(request)
        state = self._state
        request.limit(state.max_model_len, self._eos_token_ids)
        state.requests[request.request_id] = request
        if request.facts.when_idle:
            state.idle_work.count += 1
        if request.facts.when_idle and not request.status.is_blocked:
            state.idle_work.add(request)
        else:
            state.waiting.add(request)
        state.totals.requests_started += 1
        state.settled = False
        if state.connector is not None:
            state.connector.on_new_request(request)
        if state.pins is not None:
            state.pins.arrived(request)

    def _check(self, request: Request) -> None:
        state = self._state
        request_id = request.request_id
        if request_id in state.requests or request_id in state.held or state.cache.has_blocks(request_id):
            raise InvalidRequest(f"a request with the id {request_id!r} is already here", "request_id")
        if request.num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.facts.sampling.max_tokens <= request.num_output_tokens:
            raise InvalidRequest(
                f"max_tokens is {request.facts.sampling.max_tokens} and the request "
                f"has {request.num_output_tokens} output tokens already",
                "max_tokens",
            )
        if request.has_images:
            self._check_media(request)
        if request.facts.pooling is not None:
            self._check_pooled(request)
            return
        if request.num_tokens >= self._context:
            raise ContextLengthExceeded(
                f"{request.num_tokens} tokens leave no room to answer in a context of {self._context}"
            )
        if request.num_tokens >= state.max_model_len:
            raise InvalidRequest(
                f"{request.num_tokens} tokens do not fit: the KV cache of this node has room "
                f"for {state.max_model_len - 1} and one to answer",
                "prompt",
            )

    def _check_pooled(self, request: Request) -> None:
        """A request for a vector may fill the whole context, because it gets no output token."""
        if request.num_tokens > self._context:
            raise ContextLengthExceeded(
                f"{request.num_tokens} tokens are more than the model's context of {self._context}"
            )
        if request.num_tokens > self._state.max_model_len:
            raise InvalidRequest(
                f"{request.num_tokens} tokens do not fit: the KV cache of this node has room "
                f"for {self._state.max_model_len}",
                "prompt",
            )

    def _check_media(self, request: Request) -> None:
        encoded, config = self._state.encoded, self._state.config
        if encoded is None:
            raise InvalidRequest("this node's model reads no images")
        largest = max(feature.length for feature in request.media)
        if not config.chunked_prefill and (largest := sum(each.length for each in request.media)) > (
            most := min(encoded.tokens_per_step, encoded.capacity)
        ):
            raise InvalidRequest(
                f"images of {largest} tokens are more than the {most} of one step, and prompts are not cut: set "
                "scheduler.chunked_prefill"
            )
        if largest > encoded.capacity:
            raise InvalidRequest(
                f"an image takes {largest} tokens, more than the {encoded.capacity} that this node keeps of images "
                "(cache.encoder_tokens)"
            )

    def expect_rows(self, request_id: str) -> list[MediaFeature]:
        """See Scheduler.expect_rows."""
        state, request = self._state, self._state.requests.get(request_id)
        if state.encoded is None or request is None or not request.has_images:
            return []
        _, num_cached = state.cache.find_prefix(request)
        wanted = [each for each in request.image_parts if each.offset + each.length > num_cached]
        return state.encoded.expect(request_id, wanted)

    def rows_came(self, identifier: str, rows: PromptEmbeds | None) -> None:
        state = self._state
        if state.encoded is None:
            return
        if rows is not None:
            state.encoded.came(identifier, rows)
        else:
            state.encoded.will_not_come(identifier)
        state.settled = False

    def preempt(self, request: Request) -> None:
        """Frees a running request's blocks and queues it to be computed again. The caller has removed it from `running`."""
        self._keep_what_is_read(request)
        self._state.cache.free(request)
        request.num_computed_tokens = 0
        self._line_up_again(request)

    def interrupt(self, request: Request, num_valid_tokens: int) -> None:
        """Rewinds a running request to its first `num_valid_tokens` tokens, whose blocks it keeps, and queues it. The caller
        removes it from `running`."""
        self._keep_what_is_read(request)
        self._state.cache.rewind(request, num_valid_tokens)
        self._line_up_again(request)

    def _keep_what_is_read(self, request: Request) -> None:
        """The request is about to lose blocks. Those that a connector still copies from stay out of the pool until it has."""
        if self._state.connector is not None:
            self._state.cache.begin_reads(self._state.connector.blocks_given_up(request.request_id))

    def _line_up_again(self, request: Request) -> None:
        state = self._state
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        request.num_preemptions += 1
        request.lost_load = request.num_preemptions > MOST_LOADED
        state.totals.preemptions += 1
        state.preempted_req_ids.add(request.request_id)
        leave_steps(state, request)
        if state.encoded is not None:
            state.encoded.release(request.request_id)
        if request.facts.when_idle and not request.num_computed_tokens:
            # Not into the scheduler's line: its head must stay the request that these blocks are for.
            state.idle_work.put_back(request)
        else:
            state.waiting.put_back(request)

    def take_blocks_of_idle_work(self, wanted_by: Request, step: StepPlan) -> bool:
        """Preempts the last request that rests. Returns False when none does. Then the connector is asked to
        give up blocks that it keeps of ended ones, the last first; they are free a moment later."""
        state = self._state
        victim = state.idle_work.last_resting() if state.open_step is None else None
        if victim is None:
            if not wanted_by.facts.when_idle:
                self._call_back_idle_work(wanted_by)
            return False
        step.evictions.append(
            Eviction(
                victim.request_id,
                wanted_by.request_id,
                state.cache.num_blocks_of(victim.request_id),
                victim.num_computed_tokens,
            )
        )
        self.preempt(victim)
        step.moved = True
        return True

    def _call_back_idle_work(self, wanted_by: Request) -> None:
        """Asks for as much as is missing, and for one more in each step: what has a consumer already comes when it is sent."""
        state = self._state
        called = state.idle_work.called_back
        coming = sum(state.cache.num_blocks_of(request_id) for request_id in called)
        missing = state.cache.num_blocks_until(wanted_by, wanted_by.num_tokens) - state.cache.pool.num_free - coming
        for request in [one for one in reversed(state.held.values()) if one.facts.when_idle]:
            if request.request_id in called:
                continue
            called.add(request.request_id)
            assert state.connector is not None  # it keeps the blocks
            state.connector.call_back(request)
            missing -= state.cache.num_blocks_of(request.request_id)
            if missing <= 0:
                return

    def take_blocks_of_waiting(self, besides: Request) -> bool:
        """Frees the blocks of the least urgent waiting request that has any, other than `besides`. Returns False when there is
        none."""
        state = self._state
        holder = state.waiting.least_urgent_holder(besides)
        if holder is None:
            return False
        self._keep_what_is_read(holder)
        state.cache.free(holder)
        holder.num_computed_tokens = 0
        holder.lost_load = True
        state.waiting.lost_blocks(holder)
        return True

    def finish_all(
        self, request_ids: Iterable[str], status: RequestStatus, error: TandemError | None = None
    ) -> list[str]:
        """Ends unfinished requests in any status; returns the ids of those that were found. `error` is why they failed."""
        state = self._state
        found = [
            request
            for request_id in dict.fromkeys(request_ids)
            if (request := state.requests.get(request_id)) is not None
        ]
        running = {request.request_id for request in found if request.status is RequestStatus.RUNNING}
        if running:
            state.running = [request for request in state.running if request.request_id not in running]
        for request in found:
            was_running = request.status is RequestStatus.RUNNING
            was_idle = request.facts.when_idle and state.idle_work.remove(request)
            self.end(request, status, error)
            if not (was_running or was_idle):
                state.waiting.remove(request)
        return [request.request_id for request in found]

    def end(self, request: Request, status: RequestStatus, error: TandemError | None = None) -> None:
        """Ends a request; every request ends here. The caller removes it from `running` or `waiting`. `error` is why it failed.

        The request owns its blocks until the connector has been asked. If the connector still needs them, the request is held
        and `release` frees them later; otherwise they are freed, or pinned, now.
        """
        state = self._state
        request_id = request.request_id
        request.status = status
        request.spec_token_ids = []
        # Steps that are not booked may turn out void. No request may begin from their tokens, and no event may announce them.
        request.num_computed_tokens = max(request.num_computed_tokens - leave_steps(state, request), 0)
        state.cache.forget_uncomputed(request)
        if state.encoded is not None:
            state.encoded.release(request_id)
            state.encoded.forget(request_id)
        del state.requests[request_id]
        state.idle_work.count -= request.facts.when_idle
        state.finished_req_ids.add(request_id)
        state.settled = False
        if status in ANSWERED and request.facts.pooling is None:
            state.answers.ended(request.num_output_tokens)
        if (reason := request.finish_reason) is not None:
            finished = state.totals.requests_finished
            finished[reason.value] = finished.get(reason.value, 0) + 1
            state.totals.client_errors += isinstance(error, _OF_CLIENTS)
        if state.connector is not None:
            state.cache.drop_skipped_blocks(request)
            if state.connector.request_finished(request, state.cache.block_ids(request_id)):
                state.held[request_id] = request
                return
        self._let_go(request)

    def release(self, request_id: str) -> None:
        """The connector no longer needs the blocks of a held request: frees or pins them."""
        self._state.idle_work.called_back.discard(request_id)
        self._let_go(self._state.held.pop(request_id))
        self._state.settled = False

    def _let_go(self, request: Request) -> None:
        """Frees the blocks of an ended request, or pins them for its job's next turn."""
        state = self._state
        if state.pins is None or not state.pins.keep(request):
            state.cache.free(request)

    def begin_generation(self) -> None:
        """KV that is here may be wrong, and so may all KV that was computed from it; a block's hash cannot tell which that is. So
        the cache begins a new generation. Nothing of the old one is found again: not in the prefix cache, not in the
        connector's tiers, not where peers have copied it; nor are rows of images. Requests that have blocks may finish with them, but nothing of theirs
        is cached or stored. Pinned turns lose their blocks."""
        state = self._state
        if state.pins is not None:
            state.pins.end_all("reset")
        for request in (*state.requests.values(), *state.held.values()):
            request.is_distrusted = True
        state.cache.reset_prefix_cache()
        if state.encoded is not None:
            state.encoded.drop_all()
        state.totals.cache_generation += 1
        state.settled = False
        if state.connector is not None:
            state.connector.reset_cache()


def failure_of(request: Request, error: TandemError) -> TokenChunk:
    """The last chunk of a request that an error has ended."""
    return TokenChunk.failed(request.request_id, request.num_output_tokens, error.to_wire())
