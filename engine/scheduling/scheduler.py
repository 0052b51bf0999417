"""Decides who computes how many tokens in the next step, and books what came of it.

There is no prefill and no decode phase. A request has tokens and a count of those that are computed; a step
hands out its one budget of tokens so that the counts catch up, first to those that run, then to those in line.
A prompt is a request that is far behind, a decode one that is one token behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.cache.encoder_cache import EncoderCache
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.hashing import BlockHasher, make_block_hasher
from tandem.engine.cache.manager import KVCacheManager, Tables, hash_block_size
from tandem.engine.cache.pool import CacheEvents, Residency
from tandem.engine.cache.state_slots import StateManager
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.admission import AdmissionPhase, RunningPhase
from tandem.engine.scheduling.audit import check_integrity
from tandem.engine.scheduling.drafting import DraftJudge
from tandem.engine.scheduling.lifecycle import Lifecycle
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, NewRequestData, SchedulerOutput
from tandem.engine.scheduling.pins import Pins, Tools
from tandem.engine.scheduling.queue import WaitingRequests, make_policy
from tandem.engine.scheduling.results import ModelResults, TransferResults
from tandem.engine.scheduling.state import (
    PROMPTS_ALONE,
    Pace,
    PauseState,
    SchedulerState,
    SchedulerStats,
    StepPlan,
    Totals,
    leave_open,
)
from tandem.engine.scheduling.step_trace import StepTrace
from tandem.engine.scheduling.unchanged import num_unchanged_steps, take_unchanged_steps
from tandem.kvtransfer.base import ConnectorOutput, SchedulerConnector
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.errors import ConfigurationError
from tandem.wire.images import MediaFeature
from tandem.wire.kv_events import KVEvent
from tandem.wire.requests import TokenChunk

__all__ = ["PauseState", "Scheduler"]


class Scheduler:
    """Used from one thread. A step is `schedule`, then the model, then `update_from_output`; requests come and go
    between steps. The next step can be scheduled while the model is at work, if `leave_open` says so."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        connector: SchedulerConnector | None = None,
        load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
        clock: Callable[[], float] = time.monotonic,
        *,
        zero_new_blocks: bool = False,
        trace: StepTrace | None = None,
        reads_images: bool = False,
        reads_hidden: bool = False,
    ) -> None:
        """`zero_new_blocks` is for attention kernels that read past a request's last token: the runner is told
        which blocks hold something stale."""
        if config.max_model_len is not None:
            max_model_len = min(max_model_len, config.max_model_len)
        keeps_states = any(group.kind is AttentionKind.STATE for group in groups)
        # A step ends where states are kept, and prompts that must not be cut have no such place.
        checkpoint_tokens = cache.checkpoint_tokens if config.chunked_prefill else 0
        # Keys and values of a prefix are worth nothing without the state after it.
        caching = cache.prefix_caching and (checkpoint_tokens > 0 or not keeps_states)
        kv_cache = KVCacheManager(
            groups,
            num_blocks,
            caching=caching,
            max_model_len=max_model_len,
            num_lookahead_tokens=config.num_speculative_tokens,
            max_new_tokens=config.max_num_batched_tokens,
            checkpoint_tokens=checkpoint_tokens,
            gives_up_last_block=reads_hidden,
        )
        totals = Totals()
        kv_cache.pool.residency = Residency(num_blocks, clock, totals)
        if not config.chunked_prefill and config.max_num_batched_tokens < kv_cache.max_request_tokens - 1:
            raise ConfigurationError(
                "without scheduler.chunked_prefill a whole request must fit into one step: set "
                f"scheduler.max_num_batched_tokens to {kv_cache.max_request_tokens - 1} or more, "
                f"or scheduler.max_model_len to {config.max_num_batched_tokens + 1} or less"
            )
        if connector is not None:
            connector.bind_block_tables(kv_cache)
            if kv_cache.checkpoints is not None:
                kv_cache.checkpoints.wanted = connector.wants_checkpoints
        pins = Pins(config.pins_for_s, clock) if config.pins_for_s else None
        if pins is not None and keeps_states:
            pins.close()  # a prompt begins from a checkpoint, whose blocks are no request's
        policy = make_policy(config.policy, pins)
        self._zero_new_blocks = zero_new_blocks
        self._state = SchedulerState(
            config=config,
            max_model_len=kv_cache.max_request_tokens,
            policy=policy,
            cache=kv_cache,
            connector=connector,
            load_failure_policy=load_failure_policy,
            clock=clock,
            waiting=WaitingRequests(policy),
            totals=totals,
            pins=pins,
            encoded=EncoderCache(cache.encoder_tokens, config.max_encoder_tokens) if reads_images else None,
            judge=DraftJudge(
                config.num_speculative_tokens, config.max_draft_loss, computed_twice=keeps_states
            )
            if config.num_speculative_tokens
            else None,
        )
        self._trace = trace  # None: nothing is noted
        if trace is not None:
            trace.begins(self._state)
        self._lifecycle = Lifecycle(self._state, max_model_len, eos_token_ids)
        self._running_phase = RunningPhase(self._state, self._lifecycle)
        self._admission_phase = AdmissionPhase(self._state, self._lifecycle, trace)
        self._transfers = TransferResults(self._state, self._lifecycle)
        self._results = ModelResults(self._state, self._lifecycle)
        self._pace = Pace(config.step_target_ms)
        self._tower_pace = Pace(config.step_target_ms)  # in tokens of images
        self._judge = self._state.judge
        # For the makers of requests, so that prompts are hashed outside the step.
        self.block_hasher: BlockHasher | None = None
        if caching:
            self.block_hasher = make_block_hasher(
                cache.hash_algorithm, hash_block_size(groups), cache.shared_hash_seed
            )

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by id. To be read, not changed."""
        return self._state.requests

    @property
    def running(self) -> Sequence[Request]:
        """Those that get tokens computed, in order of admission. To be read, not changed."""
        return self._state.running

    @property
    def encoded(self) -> EncoderCache | None:
        """Which parts of images the runner has; None where the model reads none. To be read, not changed."""
        return self._state.encoded

    @property
    def max_model_len(self) -> int:
        """How many tokens one request may have here: the model's context, or what the KV cache has room for."""
        return self._state.max_model_len

    def add_request(self, request: Request) -> None:
        """Puts a request in line. Raises a RequestError for one that can never run here, and changes nothing."""
        if request.block_hasher is None and self.block_hasher is not None:
            request.hash_with(self.block_hasher)
        self._lifecycle.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[str]:
        """Ends requests from outside, whatever they wait for. Unknown ids and those that have ended are ignored;
        returns the others."""
        return self._lifecycle.finish_all(request_ids, status)

    def wake(self, request_id: str) -> None:
        """What a request stood aside for from the start, such as its grammar, is there."""
        request = self._state.requests.get(request_id)
        if request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            request.status = RequestStatus.WAITING
            self._state.waiting.wake(request)
            self._state.settled = False

    def expect_rows(self, request_id: str) -> list[MediaFeature]:
        """An encoder node makes the request's rows of images. Returns what it is to be asked for: the parts that are neither here, nor on
        their way, nor in a prefix that is cached."""
        return self._lifecycle.expect_rows(request_id)

    def rows_came(self, identifier: str, rows: PromptEmbeds | None) -> None:
        """Of a part of an image; None: they will not come."""
        self._lifecycle.rows_came(identifier, rows)

    def schedule(self) -> SchedulerOutput:
        state = self._state
        if state.pins is not None:
            self._sweep(state.pins)
        paused = state.pause is PauseState.PAUSED_ALL
        budget = 0 if paused else state.config.max_num_batched_tokens
        step = StepPlan(budget, prompt_budget=self._budget_of_prompts(budget))
        if self._trace is not None:
            self._trace.snapshot(state)
        if state.encoded is not None:
            state.encoded.begin_step(self._tower_pace.tokens if self._decodes() else math.inf)
        self._running_phase.plan(step)
        # A request admitted while others lose their blocks would keep its own only for a moment.
        if not (step.preempted or step.ran_short) and state.pause is PauseState.UNPAUSED:
            self._admission_phase.plan(step)
        output = self._output_of(step)
        if self._trace is not None:
            self._trace.decided(state, step, output.finished_req_ids, output.preempted_req_ids)
        if state.connector is not None:
            output.connector_metadata = state.connector.build_connector_meta(output)
            state.cache.begin_reads(output.connector_metadata.reads)
        self._advance(step)
        if self._judge is not None:
            output.draft_limits = self._judge.limits(
                output, map(state.requests.__getitem__, step.num_scheduled)
            )
        state.totals.steps += 1
        if output.total_num_scheduled_tokens:
            state.totals.step_of(output.total_num_scheduled_tokens)
        state.planned = output
        state.settled = not (step.num_scheduled or step.preempted or step.moved or step.deferred)
        return output

    def _sweep(self, pins: Pins) -> None:
        """Before anything is decided: what a pin keeps no longer would be taken for used."""
        for job_id in pins.overdue():
            self._lifecycle.unpin(job_id, "time")
        if pins.changed:
            pins.changed = False
            self._state.waiting.put_in_order()

    def seconds_until_sweep(self) -> float | None:
        """Until the next pin ends; None: there is none."""
        state = self._state
        until = state.pins.next_end() if state.pins is not None else None
        return max(until - state.clock(), 0.0) if until is not None else None

    def turn_ended(self, job_id: str, request_id: str, tools: Tools) -> None:
        """The answer of a job's turn is whole, and called these tools. Its pin goes on if they are quick."""
        state = self._state
        if state.pins is not None and not state.pins.ended(job_id, request_id, tools):
            self._lifecycle.unpin(job_id, "slow_tool")

    def end_pins(self) -> None:
        """For good: nothing is pinned here, and nothing will be."""
        pins = self._state.pins
        for job_id in pins.close() if pins is not None else ():
            self._lifecycle.unpin(job_id, "closing")

    def _budget_of_prompts(self, budget: int) -> int:
        """The prompt tokens this step may compute: its whole budget, or fewer where that takes longer than `step_target_ms`. While
        requests decode, all of them wait for it. Otherwise the first prompt may have all of the budget, and others share its step
        only as far as that stays short: each of them gets its first token when the step ends."""
        state, fitting = self._state, self._pace.tokens
        if fitting >= budget or not state.config.chunked_prefill:
            return budget
        if self._decodes():
            return int(fitting)
        first = state.running[0] if state.running else state.waiting.head()
        of_first = first.num_tokens - first.num_computed_tokens if first is not None else 0
        return min(budget, max(int(PROMPTS_ALONE * fitting), of_first))

    def _decodes(self) -> bool:
        return any(request.num_tokens - request.num_computed_tokens <= 1 for request in self._state.running)

    def _output_of(self, step: StepPlan) -> SchedulerOutput:
        state = self._state
        known = step.running + step.resumed
        cached = CachedRequestData(
            req_ids=[request.request_id for request in known],
            num_computed_tokens=[request.num_computed_tokens for request in known],
        )
        if step.new_blocks:
            cached.new_block_ids = list(map(step.new_blocks.get, cached.req_ids))
        else:
            cached.new_block_ids = [None] * len(known)
        for i, request in enumerate(step.resumed, len(step.running)):
            cached.new_block_ids[i] = state.cache.block_ids(request.request_id)
            cached.resumed_req_ids.add(request.request_id)
            cached.resumed_token_ids[request.request_id] = list(request.all_token_ids)
        output = SchedulerOutput(
            new_reqs=[self._describe(request) for request in step.new],
            cached_reqs=cached,
            num_scheduled_tokens=step.num_scheduled,
            total_num_scheduled_tokens=sum(step.num_scheduled.values()),
            spec_token_ids=step.drafts,
            finished_req_ids=state.finished_req_ids,
            preempted_req_ids=state.preempted_req_ids,
            begins_loads=step.begins_loads,
            reads_loads=step.reads_loads,
            ran_short=step.ran_short,
            num_prompt_tokens=step.num_tokens_of_prompts(),
        )
        if state.cache.checkpoints is not None:
            state.cache.checkpoints.keep(state.requests, step.num_scheduled, state.connector)
            output.state_copies, output.checkpoint_blocks = state.cache.take_state_copies()
        if state.encoded is not None:
            output.encoder_inputs, output.forgotten_media = state.encoded.take_step()
        # The output keeps the sets, so new ones are begun.
        state.finished_req_ids, state.preempted_req_ids = set(), set()
        fresh = state.cache.take_fresh_blocks()
        if self._zero_new_blocks:
            output.new_block_ids_to_zero = fresh
        return output

    def _describe(self, request: Request) -> NewRequestData:
        return NewRequestData(
            req_id=request.request_id,
            token_ids=list(request.all_token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=self._state.cache.block_ids(request.request_id),
            num_computed_tokens=request.num_computed_tokens,
            lora=request.lora,
            pooling=request.pooling,
            media=request.media if request.has_images else (),
            embeds=request.embeds,
        )

    def _advance(self, step: StepPlan) -> None:
        """The step's tokens count as computed from here on. Drafts that turn out wrong are taken back later."""
        requests, of_prompts, encoded = self._state.requests, 0, self._state.encoded
        for request_id, num_tokens in step.num_scheduled.items():
            request = requests[request_id]
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                of_prompts += min(left, num_tokens)
            request.num_computed_tokens += num_tokens
            if encoded is not None and request.has_images:
                encoded.passed(request)
        self._state.totals.prompt_tokens_computed += of_prompts

    def leave_open(self, step: SchedulerOutput) -> bool:
        """Whether the next step may be planned before `step`, the newest, is booked. Then it has to be, and is booked
        after that. Every request that gets a token of it counts as having that token from here on."""
        return leave_open(self._state, step)

    def took(self, step: SchedulerOutput, seconds: float) -> None:
        """How long the model needed for a step: what the next ones are given of prompts follows from it."""
        if made_here := sum(one.length for one in step.encoder_inputs if one.rows is None):
            # Most of it was the vision tower's: it says nothing of prompts' tokens.
            self._tower_pace.took(made_here, seconds)
        elif step.num_prompt_tokens:
            self._pace.took(step.num_prompt_tokens, seconds)
            if self._state.connector is not None:
                self._state.connector.step_took(step.num_prompt_tokens, seconds)
        if self._judge is not None:
            self._judge.took(step, seconds)

    def update_from_output(
        self,
        step: SchedulerOutput,
        model_output: ModelOutput,
        connector_output: ConnectorOutput | None = None,
    ) -> list[TokenChunk]:
        """Books a step. Transfers first: they say which of the model's results can't be right."""
        state = self._state
        updates: list[TokenChunk] = []
        if connector_output is not None:
            if state.connector is not None:
                state.connector.update_connector_output(connector_output)
            if not connector_output.is_empty:
                updates = self._transfers.apply(connector_output)
        # From here on it counts as computed.
        if state.open_step is step:
            state.open_step = None
            state.settled = False
        if state.planned is step:
            state.planned = None
        if step.checkpoint_blocks:
            state.cache.release_checkpoints(step.checkpoint_blocks)
            state.settled = False
        updates += self._results.apply(step, model_output)
        return updates

    def num_unchanged_steps(self) -> int:
        """For a simulation: how many of the next steps give each running request one token, and do nothing else."""
        return num_unchanged_steps(self._state)

    def take_unchanged_steps(self, steps: int) -> None:
        """Takes so many of them at once, planned and booked; every request gets its newest token again in each."""
        take_unchanged_steps(self._state, steps)

    def lend_blocks(self, borrower: Request) -> Tables | None:
        """Blocks for all tokens of a request that is never scheduled; None while less than half of the pool would stay free.
        They are held until `take_blocks_back`, and never cached."""
        state = self._state
        cache = state.cache
        most = cache.coordinator.max_blocks(borrower.num_tokens, borrower.num_tokens)
        if 2 * most > cache.pool.num_free or borrower.num_tokens >= state.max_model_len:
            return None
        none_found: Tables = [[] for _ in cache.coordinator.managers]
        blocks = cache.allocate_slots(borrower, borrower.num_tokens, hits=none_found, delay_caching=True)
        if blocks is not None:
            borrower.status = RequestStatus.FINISHED_ABORTED  # a held request is one that has ended
            state.held[borrower.request_id] = borrower
        return blocks

    def take_blocks_back(self, borrower_id: str) -> None:
        self._lifecycle.release(borrower_id)

    def find_prefix(self, request: Request) -> tuple[Tables, int]:
        """Cached blocks for the request's beginning, per group, and how many tokens they hold."""
        return self._state.cache.find_prefix(request)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Removes blocks from the prefix cache, and their copies from a connector's: their content is wrong."""
        self._state.forget_blocks(blocks)

    def holds_blocks_of(self, request_id: str) -> bool:
        """It has ended, and a connector has not given its blocks back yet."""
        return request_id in self._state.held

    def has_unfinished_requests(self) -> bool:
        return bool(self._state.requests)

    def has_work(self) -> bool:
        """Whether a step could do anything now. False while everything waits for an event: a transfer (whose
        connector then wakes the engine), blocks that a connector holds, the end of a pause."""
        state = self._state
        if state.finished_req_ids or state.preempted_req_ids or state.open_step is not None:
            return True
        if state.connector is not None and state.connector.has_pending_work():
            return True
        return not state.settled and bool(state.running or state.waiting.num_ready)

    @property
    def pause_state(self) -> PauseState:
        return self._state.pause

    def set_pause_state(self, pause: PauseState) -> None:
        self._state.pause = pause
        self._state.settled = False

    def reset_prefix_cache(self) -> None:
        """No request that comes from now on begins from KV that is cached now, in any tier. What runs keeps its blocks; what is only pinned
        does not."""
        pins = self._state.pins
        for job_id in list(pins.by_job) if pins is not None else ():
            self._lifecycle.unpin(job_id, "reset")
        self._state.cache.reset_prefix_cache()
        self._state.settled = False
        if self._state.connector is not None:
            self._state.connector.reset_cache()

    def tell_cache_events(self) -> None:
        """From now on what is cached is noted, to be taken. To be called before the first request."""
        pool = self._state.cache.pool
        if pool.caching:
            groups = self._state.cache.coordinator.managers
            pool.events = CacheEvents(
                len(groups), untold=[group.index for group in groups if isinstance(group, StateManager)]
            )
            if self._state.connector is not None:
                self._state.connector.note_events()

    def take_cache_events(self) -> Sequence[KVEvent]:
        """What was cached and evicted since the last call, on the device and in a connector's tiers."""
        events, connector = self._state.cache.pool.events, self._state.connector
        if events is None:
            return ()
        taken = events.take()
        of_tiers = list(connector.take_events()) if connector is not None else []
        return [*taken, *of_tiers] if of_tiers else taken

    def stats(self) -> SchedulerStats:
        """Costs a walk over all unfinished requests."""
        return self._state.stats()

    def check_integrity(self) -> None:
        """Raises InternalError for anything that contradicts anything else. Walks the whole pool."""
        check_integrity(self._state)
