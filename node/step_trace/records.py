"""The scheduler trace: what a node's scheduler saw and decided, step by step, as lines of JSON in files of bounded size.

Each step writes `step_snapshot`, the state before it; a `prefix_cache_event` for each request whose prefix was looked up; and
`step_decision`, what the step does. They carry the same step number. `tandem replay` and the simulator read them.

The step thread encodes the records, and another thread writes them. A slow or full disk loses records, which are counted; it
never delays a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tandem.engine.request import Request
from tandem.engine.scheduling.state import Eviction, SchedulerState, StepPlan
from tandem.kvtransfer.base import TierRoom

MAX_LISTED = 512  # requests of one kind in a snapshot, which also has their number


class TracedRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request in a snapshot."""

    request_id: str
    status: str
    tokens: int
    computed: int
    blocks: int
    preemptions: int
    waited_s: float  # since its arrival


class TraceHeader(msgspec.Struct, frozen=True, tag="trace_begins", tag_field="event"):
    """Begins each file and each start of the node, with which the steps count from 0 again."""

    node_id: str
    unix_time: float
    clock: float  # the same moment on the steps' clock (`StepSnapshot.at`)
    total_blocks: int
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class StepSnapshot(msgspec.Struct, frozen=True, tag="step_snapshot", tag_field="event"):
    """The scheduler's state before a step."""

    step: int
    at: float  # seconds on the node's monotonic clock
    running: list[TracedRequest]  # in order of admission
    waiting: list[TracedRequest]  # in line, in no order
    blocked: list[TracedRequest]  # those that wait for an event, such as their KV
    num_running: int
    num_waiting: int
    num_blocked: int
    held: dict[str, int]  # blocks of ended requests whose transfer goes on, by request
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    quarantined_blocks: int
    pinned: dict[str, int] = {}  # blocks of pinned turns, by job
    tiers: list[TierRoom] = []  # the nearest first


class PrefixCacheEvent(msgspec.Struct, frozen=True, tag="prefix_cache_event", tag_field="event"):
    """What the prefix cache and the connector have for a request."""

    step: int
    request_id: str
    prompt_tokens: int
    tokens: int  # with its output so far, after a preemption
    local_tokens: int  # found in the prefix cache
    external_tokens: int  # promised by the connector
    arrives_later: bool
    connector: str | None
    job_id: str | None = None  # the agent's job of which the request is a turn


class StepDecision(msgspec.Struct, frozen=True, tag="step_decision", tag_field="event"):
    """What a step computes, which requests it preempted, and why the next one in line was not admitted."""

    step: int
    new: list[str]
    resumed: list[str]
    running: list[str]  # those that ran before this step
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    drafts: dict[str, int]  # how many of the scheduled tokens are drafts
    preempted: list[Eviction]
    finished: list[str]  # those that ended since the step before
    loads: list[str]  # those whose KV a connector loads from this step on
    held_back: str  # the first request in line that was not admitted; "" without one
    why: str
    token_budget: int  # tokens left in the step
    prompt_budget: int
    free_blocks: int  # after the step was planned


class RecordsLost(msgspec.Struct, frozen=True, tag="records_lost", tag_field="event"):
    """Records that were dropped because the disk was too slow."""

    count: int


TraceRecord = TraceHeader | StepSnapshot | PrefixCacheEvent | StepDecision | RecordsLost


class StepTrace:
    """Makes the records of each step and passes their lines to `write`: a `StepWatcher`."""

    def __init__(self, node_id: str, write: Callable[[bytes], None]) -> None:
        self._node_id = node_id
        self._write = write
        self._encoder = msgspec.json.Encoder()
        self._pending: list[TraceRecord] = []
        # What `_held_back` returned if the step before did nothing, else None. Equal idle steps are written once.
        self._idle: tuple[str, str] | None = ("", "")

    def begins(self, state: SchedulerState) -> None:
        config = state.config
        self._put(
            TraceHeader(
                self._node_id,
                time.time(),
                state.clock(),
                state.cache.pool.num_usable,
                config.policy.value,
                config.max_num_seqs,
                config.max_num_batched_tokens,
                state.max_model_len,
            )
        )

    def snapshot(self, state: SchedulerState) -> None:
        now, pool = state.clock(), state.cache.pool
        blocked = [request for _, request in state.waiting.blocked.values()]
        in_line = [request for request in state.waiting if request.request_id not in state.waiting.blocked]

        def listed(requests: list[Request]) -> list[TracedRequest]:
            return [_traced(state, request, now) for request in requests[:MAX_LISTED]]

        self._pending = [
            StepSnapshot(
                step=state.totals.steps,
                at=now,
                running=listed(state.running),
                waiting=listed(in_line),
                blocked=listed(blocked),
                num_running=len(state.running),
                num_waiting=len(in_line),
                num_blocked=len(blocked),
                held={request_id: state.cache.num_blocks_of(request_id) for request_id in state.held},
                free_blocks=pool.num_free,
                cached_blocks=pool.num_cached,
                total_blocks=pool.num_usable,
                quarantined_blocks=len(pool.quarantined),
                pinned=_pinned(state),
                tiers=list(state.connector.tier_rooms()) if state.connector is not None else [],
            )
        ]

    def looked_up(
        self, state: SchedulerState, request: Request, local: int, external: int, *, arrives_later: bool
    ) -> None:
        self._pending.append(
            PrefixCacheEvent(
                state.totals.steps,
                request.request_id,
                request.num_prompt_tokens,
                request.num_tokens,
                local,
                external,
                arrives_later,
                type(state.connector).__name__ if state.connector is not None else None,
                request.facts.job_id,
            )
        )

    def decided(self, state: SchedulerState, step: StepPlan, finished: set[str], preempted: set[str]) -> None:
        of_step = {victim.request_id for victim in step.evictions}
        evictions = [*step.evictions, *(Eviction(request_id, "", 0, 0) for request_id in sorted(preempted - of_step))]
        held_back = _held_back(state, step)
        if step.num_scheduled or evictions or finished or step.loads:
            self._idle = None
        elif held_back == self._idle:
            self._pending.clear()  # nothing has changed since the step before, whose records are written
            return
        else:
            self._idle = held_back
        for record in self._pending:
            self._put(record)
        self._pending.clear()
        self._put(
            StepDecision(
                step=state.totals.steps,
                new=[request.request_id for request in step.new],
                resumed=[request.request_id for request in step.resumed],
                running=[request.request_id for request in step.running],
                num_scheduled_tokens=step.num_scheduled,
                total_num_scheduled_tokens=sum(step.num_scheduled.values()),
                drafts={request_id: len(drafts) for request_id, drafts in step.drafts.items()},
                preempted=evictions,
                finished=sorted(finished),
                loads=step.loads,
                held_back=held_back[0],
                why=held_back[1],
                token_budget=step.token_budget,
                prompt_budget=step.prompt_budget,
                free_blocks=state.cache.pool.num_free,
            )
        )

    def _put(self, record: TraceRecord) -> None:
        self._write(self._encoder.encode(record) + b"\n")


def _pinned(state: SchedulerState) -> dict[str, int]:
    pinned = state.pins.pinned if state.pins is not None else {}
    return {job_id: state.cache.num_blocks_of(request.request_id) for job_id, request in pinned.items()}


def _traced(state: SchedulerState, request: Request, now: float) -> TracedRequest:
    return TracedRequest(
        request.request_id,
        request.status.name.lower(),
        request.num_tokens,
        request.num_computed_tokens,
        state.cache.num_blocks_of(request.request_id),
        request.num_preemptions,
        round(max(now - request.arrival_time, 0.0), 6),
    )


def _held_back(state: SchedulerState, step: StepPlan) -> tuple[str, str]:
    """The next request in line that was not admitted, and why; ("", "") without one."""
    if step.held_back is not None:
        return step.held_back
    head = state.waiting.head()
    if head is None:
        return ("", "")
    if step.preempted:
        why = "requests were preempted in this step"
    elif step.ran_short:
        why = "a running request waits for blocks until the open step is booked"
    elif len(state.running) >= state.config.max_num_seqs:
        why = f"{state.config.max_num_seqs} requests run, and no more may"
    elif step.token_budget <= 0:
        why = "no tokens are left in this step"
    else:
        why = "it was passed over: its connector cannot say yet, or there is no room for its adapter"
    return (head.request_id, why)
