"""Checks the scheduler's invariants between two steps: each request is in one place, its counters agree, each block has owners."""

from __future__ import annotations

from tandem.base.errors import InternalError
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.state import SchedulerState


def check_integrity(state: SchedulerState) -> None:
    """Raises an InternalError for the first invariant that does not hold."""
    _check_places(state)
    for request in state.requests.values():
        _check_counters(state, request)
        _check_placeholders(state, request)
    _check_queued_tokens(state)
    state.cache.check_integrity(_owners(state))
    if state.encoded is not None:
        state.encoded.check_integrity({request.request_id: request for request in state.running})


def _check_places(state: SchedulerState) -> None:
    """Each unfinished request is in exactly one place, and its status agrees with it."""
    waiting = list(state.waiting)
    placed = [*state.running, *waiting, *state.idle_work]
    if len({request.request_id for request in placed}) != len(placed) or len(waiting) != len(state.waiting):
        raise InternalError("a request is in two places")
    if {request.request_id for request in placed} != state.requests.keys():
        raise InternalError("a request is nowhere, or somewhere after its end")
    for request in placed:
        if state.requests[request.request_id] is not request:
            raise InternalError(f"{request!r} stands in for another of its id")
    for request in (*state.running, *state.idle_work.resting):
        if request.status is not RequestStatus.RUNNING:
            raise InternalError(f"{request!r} is among the running")
    for request in waiting:
        blocked = request.request_id in state.waiting.blocked
        if blocked != request.status.is_blocked or request.is_finished or request in state.running:
            raise InternalError(f"{request!r} is among the waiting")
    for request in state.idle_work.line:
        if request.is_finished or request.status is RequestStatus.RUNNING or request.num_computed_tokens:
            raise InternalError(f"{request!r} is in the line of idle work")
    if state.idle_work.count != sum(request.facts.when_idle for request in state.requests.values()):
        raise InternalError("idle work is counted wrongly")
    for request_id, request in state.held.items():
        if not request.is_finished or request_id in state.requests:
            raise InternalError(f"{request!r} is held and has not ended")
    if len(state.running) > state.config.max_num_seqs:
        raise InternalError(f"{len(state.running)} requests run where {state.config.max_num_seqs} may")


def _check_counters(state: SchedulerState, request: Request) -> None:
    if request.num_tokens != len(request.all_token_ids):
        raise InternalError(f"{request!r} counts {request.num_tokens} of {len(request.all_token_ids)} tokens")
    # The newest token is computed in the step that samples the next one, so only drafts and placeholders go beyond it.
    most = request.num_tokens_with_spec + request.num_output_placeholders
    if not 0 <= request.num_computed_tokens <= most:
        raise InternalError(f"{request!r} is computed further than it reaches")
    if (
        request.num_tokens + (request.facts.pooling is None) > request.length_limit
        or request.num_tokens > state.max_model_len
    ):
        raise InternalError(f"{request!r} goes on after its end")
    if request.spec_token_ids and request.status is not RequestStatus.RUNNING:
        raise InternalError(f"{request!r} has drafts and does not run")


def _check_placeholders(state: SchedulerState, request: Request) -> None:
    """A request has a placeholder only while the open step computes its next token."""
    if not request.num_output_placeholders:
        return
    step, request_id = state.open_step, request.request_id
    if step is None or request_id not in step.num_scheduled_tokens or request_id in step.void_req_ids:
        raise InternalError(f"{request!r} waits for a token that no step computes")
    if request.num_output_placeholders > 1 or request.num_tokens + 1 > request.length_limit:
        raise InternalError(f"{request!r} waits for more tokens than a step samples")


def _owners(state: SchedulerState) -> dict[str, Request]:
    """The requests that must have blocks: unfinished ones, held ones and pinned turns."""
    for request in state.waiting:
        in_line = request.request_id not in state.waiting.blocked
        if in_line and (request.num_computed_tokens > 0) != (request.request_id in state.waiting.holders):
            raise InternalError(f"{request!r} is in line, and its blocks are not accounted for")
    owners = {request.request_id: request for request in state.owners()}
    # A request may be held though it ended before it had blocks.
    owners.update(
        (request_id, request) for request_id, request in state.held.items() if state.cache.has_blocks(request_id)
    )
    owners.update(_pinned(state))
    return owners


def _pinned(state: SchedulerState) -> dict[str, Request]:
    """The pinned requests, after checking that each has ended and is pinned for its own job only."""
    if state.pins is None:
        return {}
    pinned = state.pins.pinned
    for job_id, request in pinned.items():
        if request.facts.job_id != job_id or not request.is_finished or request.facts.is_last_step:
            raise InternalError(f"{request!r} is pinned for the job {job_id!r}")
        if request.request_id in state.requests or request.request_id in state.held:
            raise InternalError(f"{request!r} is pinned, and is somewhere else too")
    return {request.request_id: request for request in pinned.values()}


def _check_queued_tokens(state: SchedulerState) -> None:
    in_line = [request for request in state.waiting if request.request_id not in state.waiting.blocked]
    actual = sum(request.num_tokens - request.num_computed_tokens for request in in_line)
    if actual != state.waiting.num_uncomputed_tokens:
        raise InternalError(f"the line counts {state.waiting.num_uncomputed_tokens} tokens and has {actual}")
