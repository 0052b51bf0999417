"""Takes many steps at once while each does the same as the one before: every running request gets one token.

Only a simulation can use this, because a real model must compute every token. The state afterwards equals the state after as
many single steps, including the blocks and their order of eviction.
"""

from __future__ import annotations

import heapq

from tandem.base.errors import InternalError
from tandem.engine.request import Request
from tandem.engine.scheduling.state import READ_EVERY, SchedulerState


def num_unchanged_steps(state: SchedulerState) -> int:
    """Returns how many of the next steps give one token to each running request and do nothing else. The count stops before a
    step in which a request ends or blocks run out; it may be lower than possible."""
    running, cache = state.running, state.cache
    if (
        not running
        or state.open_step is not None
        or state.waiting.num_ready
        or len(running) > state.config.max_num_batched_tokens
        or (state.pins is not None and state.pins.is_due)
        or (state.idle_work and state.idle_work.may_enter(state))
    ):
        return 0
    steps = min(request.length_limit - request.num_tokens for request in running) - 1
    for request in running:
        left = request.num_tokens - request.num_computed_tokens
        if left != 1 or request.num_computed_tokens < request.num_prompt_tokens or request.spec_token_ids:
            return 0
    num_free = cache.pool.num_free
    while steps > 0 and _num_blocks_missing(state, steps) > num_free:
        steps //= 2
    return max(steps, 0)


def _num_blocks_missing(state: SchedulerState, steps: int) -> int:
    missing = state.cache.coordinator.num_blocks_missing
    return sum(
        missing(request.request_id, request.num_computed_tokens + steps)
        for request in state.running
        if request.num_computed_tokens + steps > request.allocation_horizon
    )


def take_unchanged_steps(state: SchedulerState, steps: int) -> None:
    """Takes `steps` steps, at most `num_unchanged_steps`. In each, every running request gets its newest token again."""
    running, extend_slots = state.running, state.cache.extend_slots
    begun_at = [request.num_computed_tokens for request in running]
    # (step, index of the running request): when the cache manager has to allocate or cache blocks for it.
    due = [
        (max(request.allocation_horizon - begun + 1, 1), index)
        for index, (request, begun) in enumerate(zip(running, begun_at, strict=True))
        if begun + steps > request.allocation_horizon
    ]
    heapq.heapify(due)
    while due:
        step, index = due[0]
        request, begun = running[index], begun_at[index]
        _repeat_token(request, begun + step - 1 - request.num_computed_tokens)
        if extend_slots(request, 1) is None:
            raise InternalError(f"there are no blocks for step {step} of {steps} unchanged ones")
        following = max(request.allocation_horizon - begun + 1, step + 1)
        if following <= steps:
            heapq.heapreplace(due, (following, index))
        else:
            heapq.heappop(due)
    for request, begun in zip(running, begun_at, strict=True):
        _repeat_token(request, begun + steps - request.num_computed_tokens)
    state.finished_req_ids, state.preempted_req_ids = set(), set()
    _count_read(state, begun_at, steps)
    state.totals.steps += steps
    state.totals.step_of(len(running), steps)
    state.totals.wrote(steps * len(running), is_idle=state.idle_work.fills_step)
    state.settled = False


def _repeat_token(request: Request, times: int) -> None:
    if times:
        request.all_token_ids += [request.all_token_ids[-1]] * times
        request.num_tokens += times
        request.num_computed_tokens += times


def _count_read(state: SchedulerState, begun_at: list[int], steps: int) -> None:
    """As `state.count_read` counts single steps, in each of which a request reads one token more."""
    first = 1 + -state.totals.steps % READ_EVERY
    read = sum(sum(begun_at) + len(begun_at) * step for step in range(first, steps + 1, READ_EVERY))
    state.totals.context_read += READ_EVERY * read
    state.totals.pairs_read += READ_EVERY * read
