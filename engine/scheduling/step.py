"""What has been decided of a step so far."""

from __future__ import annotations

import dataclasses

from tandem.engine.cache.coordinator import Tables
from tandem.engine.request import Request


@dataclasses.dataclass(slots=True)
class StepPlan:
    token_budget: int
    prompt_budget: int  # of them, for requests that are more than one token behind and have no drafts
    num_scheduled: dict[str, int] = dataclasses.field(default_factory=dict)  # in order of scheduling
    running: list[Request] = dataclasses.field(default_factory=list)  # ran before this step
    resumed: list[Request] = dataclasses.field(default_factory=list)
    new: list[Request] = dataclasses.field(default_factory=list)
    new_blocks: dict[str, Tables] = dataclasses.field(default_factory=dict)  # of `running`; absent: none
    drafts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    # Something changed that another step could build on, though maybe nothing is computed.
    moved: bool = False
    # A connector wants to be asked again.
    deferred: bool = False
    # See SchedulerOutput.
    begins_loads: bool = False
    reads_loads: bool = False
    ran_short: bool = False

    def num_tokens_of_prompts(self) -> int:
        if sum(self.num_scheduled.values()) == len(self.num_scheduled):
            return 0
        return sum(
            num_tokens
            for request_id, num_tokens in self.num_scheduled.items()
            if num_tokens > 1 and request_id not in self.drafts
        )

    def take_back(self, request: Request) -> int:
        """Undoes what `request`, which ran before, was given in this step; returns how many tokens that was."""
        num_tokens = self.num_scheduled.pop(request.request_id, 0)
        if num_tokens:
            self.running.remove(request)
            self.new_blocks.pop(request.request_id, None)
            self.drafts.pop(request.request_id, None)
        return num_tokens
