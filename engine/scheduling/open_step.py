"""Planning a step while the one before it runs.

That one is the open step. What it will sample is not known yet, so each request that gets a token of it has a
placeholder: a token that counts, has its slot, and is fed to the next step on the device. What can't be planned with
that waits until the step is booked: nobody is preempted, and a request whose next token depends on its last in ways
that only the host knows keeps its steps from being left open. A length that is reached is known ahead; a stop is
found when the next step runs already, whose token for the request is void.
"""

from __future__ import annotations

from tandem.engine.request import Request
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.scheduling.state import SchedulerState


def leave_open(state: SchedulerState, step: SchedulerOutput) -> bool:
    """See Scheduler.leave_open."""
    if step.ran_short or step.reads_loads or step.spec_token_ids or not step.num_scheduled_tokens:
        return False
    sampled: list[Request] = []
    for request_id in step.num_scheduled_tokens:
        if request_id in step.void_req_ids:
            continue
        request = state.requests[request_id]
        if request.needs_its_last_token:
            return False
        if request.num_computed_tokens == request.num_tokens:
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
