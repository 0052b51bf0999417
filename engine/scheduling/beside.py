"""Quick prompts go beside a long one that has begun, on nodes where it takes many steps."""

from __future__ import annotations

from tandem.engine.config import SchedulingPolicy
from tandem.engine.scheduling.state import QUICK, SchedulerState, StepPlan
from tandem.wire.requests import TransferRole

# How many of the waiting prompts are looked up in the prefix cache because they may lack less than they are long.
LOOKED_UP = 8


def note_quick(state: SchedulerState, step: StepPlan) -> None:
    """Notes for the step what the prompts lack, if one that has begun cannot end in it, and which of those that wait are quick
    beside that one."""
    begun = {
        request: lacks
        for request in state.running
        if (lacks := request.num_tokens - request.num_computed_tokens) > 1 and not request.spec_token_ids
    }
    quick = max(begun.values(), default=0) // QUICK
    if quick * QUICK <= step.prompt_budget:
        return
    step.lacking = list(begun.values())
    urgent = (
        min(request.facts.priority for request in begun) if state.config.policy is SchedulingPolicy.PRIORITY else None
    )
    looked_up = 0
    for request in state.waiting.ready():
        if request.facts.when_idle or (urgent is not None and request.facts.priority > urgent):
            continue
        lacks = request.num_tokens - request.num_computed_tokens
        if lacks > quick and not request.num_computed_tokens and looked_up < LOOKED_UP:
            looked_up += 1
            lacks -= state.cache.find_prefix(request)[1]
        if lacks <= quick:
            step.lacking.append(lacks)
            step.quick.add(request.request_id)
        elif request.transfer is not None and request.transfer.role is TransferRole.CONSUME:
            step.quick.add(request.request_id)  # most of it may come from another node
