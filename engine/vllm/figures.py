"""What vLLM's scheduler does, counted under the names of Tandem's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.model.runner import ModelInfo
from tandem.engine.scheduling.state import AnswerLengths, SchedulerStats, Totals
from tandem.engine.vllm.requests import VllmRequest
from tandem.kvtransfer.base import count_blocks


def watch(scheduler: Any) -> None:
    """Has the scheduler keep its newest plan for the loop. It stays of vLLM's own class, which a node with several ranks sends to their
    processes."""
    schedule, scheduler.newest = scheduler.schedule, None

    def scheduled(*args: Any, **named: Any) -> Any:
        scheduler.newest = plan = schedule(*args, **named)
        return plan

    scheduler.schedule = scheduled


class VllmFigures:
    def __init__(self, scheduler: Any, info: ModelInfo) -> None:
        self.totals = Totals()
        self.answers = AnswerLengths()
        self._scheduler = scheduler
        self._num_blocks = info.num_blocks
        # A group with a window or with states hardly grows while its request writes.
        self._growing = [group.block_size for group in info.groups if group.keeps_every_token]

    def planned(self, plan: Any, live: Mapping[str, VllmRequest], now: float) -> int:
        """A step was planned. Returns how many of its tokens are prompts'."""
        totals = self.totals
        totals.preemptions += len(plan.preempted_req_ids or ())
        for new in plan.scheduled_new_reqs:
            if (found := live.get(new.req_id)) is not None and not found.is_admitted:
                self._admitted(found, new.num_computed_tokens, now)
        num_prompt = 0
        for request_id, count in plan.num_scheduled_tokens.items():
            if (found := live.get(request_id)) is not None:
                end = found.theirs.num_computed_tokens
                num_prompt += max(0, min(end, found.ours.num_prompt_tokens) - (end - count))
        totals.prompt_tokens_computed += num_prompt
        if plan.total_num_scheduled_tokens:
            totals.step_of(plan.total_num_scheduled_tokens)
        return num_prompt

    def _admitted(self, live: VllmRequest, num_cached: int, now: float) -> None:
        totals = self.totals
        live.is_admitted, live.queue_s = True, max(0.0, now - live.ours.arrival_time)
        live.num_cached = min(max(num_cached - live.num_received, 0), live.ours.num_prompt_tokens)
        totals.requests_admitted += 1
        totals.queue_seconds += live.queue_s
        totals.prompt_tokens_looked_up += live.ours.num_prompt_tokens
        totals.prompt_tokens_cached += live.num_cached

    def ended(self, live: VllmRequest, reason: str) -> None:
        finished = self.totals.requests_finished
        finished[reason] = finished.get(reason, 0) + 1
        self.answers.ended(live.num_outputs)

    def stats(self, live: Mapping[str, VllmRequest], quarantined: int) -> SchedulerStats:
        scheduler, pool = self._scheduler, self._scheduler.kv_cache_manager.block_pool
        held = [request_id for request_id in scheduler.requests if request_id not in live]
        running = {request.request_id for request in scheduler.running}
        waiting = [each for request_id, each in live.items() if request_id not in running]
        in_line = [each for each in waiting if not each.theirs.status.name.startswith("WAITING_FOR_")]
        return SchedulerStats(
            **self.totals.values(),
            running=len(running),
            waiting=len(waiting),
            blocked=len(waiting) - len(in_line),
            waiting_tokens=sum(map(_uncomputed, live.values())),
            free_blocks=pool.get_num_free_blocks(),
            cached_blocks=len(pool.cached_block_hash_to_block),
            total_blocks=self._num_blocks - 1,  # the first is vLLM's null block
            held_requests=len(held),
            held_blocks=sum(count_blocks(scheduler.kv_cache_manager.get_block_ids(each)) for each in held),
            quarantined_blocks=quarantined,
            wanted_blocks=sum(map(self._wanted, live.values())),
            oldest_arrival=min((each.ours.arrival_time for each in in_line), default=None),
        )

    def _wanted(self, live: VllmRequest) -> int:
        tokens = int(live.theirs.num_tokens)
        limit = live.ours.num_prompt_tokens + live.ours.facts.sampling.max_tokens
        until = tokens + self.answers.rest(live.num_outputs, limit - tokens)
        has = int(live.theirs.num_computed_tokens)
        return sum(max(0, -(-until // size) - -(-has // size)) for size in self._growing)


def _uncomputed(live: VllmRequest) -> int:
    """Tokens left to compute before the request writes."""
    return max(0, live.ours.num_tokens - int(live.theirs.num_computed_tokens))
