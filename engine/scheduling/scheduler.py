"""Decides how many tokens each request computes in the next step, and books the step's results.

There is no prefill phase and no decode phase. A request has tokens and a count of those that are computed. A step has one
token budget, which goes first to running requests and then to waiting ones, so that the counts catch up. A prompt is a
request that is far behind, a decode one that is one token behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from tandem.base.errors import ConfigurationError, TandemError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.hashing import BlockHasher, make_block_hasher
from tandem.engine.cache.manager import KVCacheManager, Tables, hash_block_size
from tandem.engine.cache.pool import CacheEvents, Residency
from tandem.engine.cache.wings import StateTables
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.admission import AdmissionPhase, RunningPhase
from tandem.engine.scheduling.audit import check_integrity
from tandem.engine.scheduling.beside import note_quick
from tandem.engine.scheduling.lifecycle import Lifecycle
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, NewRequestData, SchedulerOutput
from tandem.engine.scheduling.pace import PROMPTS_ALONE, Pace
from tandem.engine.scheduling.parts import EncodedImages
from tandem.engine.scheduling.queue import WaitingRequests, make_policy
from tandem.engine.scheduling.results import ModelResults, TransferResults
from tandem.engine.scheduling.state import (
    SchedulerState,
    SchedulerStats,
    StepPlan,
    StepWatcher,
    Totals,
    count_read,
    leave_open,
)
from tandem.engine.scheduling.unchanged import num_unchanged_steps, take_unchanged_steps
from tandem.engine.scheduling.wings import make_drafts, make_encoded, make_pins
from tandem.kvtransfer.base import ConnectorOutput, SchedulerConnector
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.kv_events import KVEvent
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import TokenChunk

# How long a step of idle work should take, as a part of `step_target_ms`.
IDLE_STEP = 0.5


class Scheduler:
    """Only the step thread uses it. A step is `schedule`, then the model, then `update_from_output`; requests are added and
    ended between these calls. The next step may be scheduled while the model computes, if `leave_open` returned True."""

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
        reads_images: bool = False,
        reads_hidden: bool = False,
        has_encoder: bool = False,
        is_timed: bool = False,
    ) -> None:
        """`reads_images` says that the model reads images. `reads_hidden` says that drafts are made from hidden states (EAGLE): a
        prefix hit then leaves its last block to be computed. `has_encoder` says that a token's KV depends on the whole prompt, so that
        no other prompt's blocks are right for it. `is_timed` says that `took` tells how long steps take, so that the first ones are
        short until it has. Raises a ConfigurationError for a budget that cannot hold an uncut
        prompt."""
        if config.max_model_len is not None:
            max_model_len = min(max_model_len, config.max_model_len)
        keeps_states = any(group.kind is AttentionKind.STATE for group in groups)
        # A chunk must end where a checkpoint is kept, so without chunked prefill there are no checkpoints.
        checkpoint_tokens = cache.checkpoint_tokens if config.chunked_prefill else 0
        # With recurrent layers, a prefix's keys and values are useless without a checkpoint of the state after it.
        caching = cache.prefix_caching and (checkpoint_tokens > 0 or not keeps_states) and not has_encoder
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
        pins = make_pins(config, clock, kv_cache.free, totals)
        if pins is not None and (keeps_states or has_encoder):
            # With recurrent layers a prompt begins from a checkpoint, and no request owns a checkpoint's blocks. With an encoder it begins
            # from nothing.
            pins.close()
        policy = pins.policy if pins is not None else make_policy(config.policy)
        self.state = SchedulerState(
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
            encoded=make_encoded(cache, config) if reads_images else None,
            judge=make_drafts(config, computed_twice=keeps_states),
        )
        self._lifecycle = Lifecycle(self.state, max_model_len, eos_token_ids)
        self._running_phase = RunningPhase(self.state, self._lifecycle)
        self._admission_phase = AdmissionPhase(self.state, self._lifecycle)
        self._transfers = TransferResults(self.state, self._lifecycle)
        self._results = ModelResults(self.state, self._lifecycle)
        self._pace = Pace(config.step_target_ms, is_timed=is_timed)
        self._tower_pace = Pace(config.step_target_ms)  # for tokens of images, which the vision tower makes
        self._judge = self.state.judge
        # Callers that make requests hash the prompts with it, outside the step. None without a prefix cache.
        self.block_hasher: BlockHasher | None = None
        if caching:
            self.block_hasher = make_block_hasher(cache.hash_algorithm, hash_block_size(groups), cache.shared_hash_seed)

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by id. Read it; do not change it."""
        return self.state.requests

    @property
    def running(self) -> Sequence[Request]:
        """Running requests in order of admission. Read it; do not change it."""
        return self.state.running

    @property
    def encoded(self) -> EncodedImages | None:
        """The parts of images that the runner has rows for; None when the model reads no images. Read it; do not change it."""
        return self.state.encoded

    @property
    def max_model_len(self) -> int:
        """The most tokens that one request may have on this node: the model's context, or fewer if the KV cache is smaller."""
        return self.state.max_model_len

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises a RequestError, and changes nothing, for a request that can never run here."""
        if request.block_hasher is None and self.block_hasher is not None:
            request.hash_with(self.block_hasher)
        self._lifecycle.add(request)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, error: TandemError | None = None
    ) -> list[str]:
        """Ends requests in any status, for example because a client left. Ignores unknown ids and requests that have ended;
        returns the ids of the others. `error` is why they failed."""
        return self._lifecycle.finish_all(request_ids, status, error)

    def wake(self, request_id: str) -> None:
        """The grammar that a request waited for is compiled, so the request may be admitted."""
        request = self.state.requests.get(request_id)
        if request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            request.status = RequestStatus.WAITING
            self.state.waiting.wake(request)
            self.state.settled = False

    def expect_rows(self, request_id: str) -> list[MediaFeature]:
        """An encoder node makes the rows of the request's images. Returns the parts to ask it for: those that are neither here,
        nor on their way, nor covered by a cached prefix."""
        return self._lifecycle.expect_rows(request_id)

    def rows_came(self, identifier: str, rows: PromptEmbeds | None) -> None:
        """Takes the rows of one part of an image from an encoder node. None says that they will not come: the vision tower here
        makes them."""
        self._lifecycle.rows_came(identifier, rows)

    def watch_with(self, watcher: StepWatcher) -> None:
        """Call it before the first step."""
        self.state.watcher = watcher
        watcher.begins(self.state)

    def schedule(self) -> SchedulerOutput:
        """Plans one step. Its tokens count as computed from here on, and the caller must run it and pass the results to
        `update_from_output`. The plan may be empty."""
        state = self.state
        # Overdue pins end before the step is planned, so that their blocks count as free in it.
        if state.pins is not None and state.pins.sweep():
            state.waiting.put_in_order()
        if state.idle_work.count:
            state.idle_work.begin_step(state)
        budget = state.config.max_num_batched_tokens
        step = StepPlan(budget, prompt_budget=self._budget_of_prompts(budget))
        if step.prompt_budget < budget and state.config.chunked_prefill:
            note_quick(state, step)
        if state.watcher is not None:
            state.watcher.snapshot(state)
        if state.encoded is not None:
            state.encoded.begin_step(self._tower_pace.tokens if self._decodes() else math.inf)
        self._running_phase.plan(step)
        # A request that is admitted while others are preempted would soon be preempted itself.
        if not (step.preempted or step.ran_short):
            self._admission_phase.plan(step)
        output = self._output_of(step)
        if state.watcher is not None:
            state.watcher.decided(state, step, output.finished_req_ids, output.preempted_req_ids)
        if state.connector is not None:
            output.connector_metadata = state.connector.build_connector_meta(output)
            state.cache.begin_reads(output.connector_metadata.reads)
        self._advance(step)
        if self._judge is not None:
            output.draft_limits = self._judge.limits(output, map(state.requests.__getitem__, step.num_scheduled))
        state.totals.steps += 1
        if output.total_num_scheduled_tokens:
            state.totals.step_of(output.total_num_scheduled_tokens)
        state.planned = output
        state.settled = not (step.num_scheduled or step.preempted or step.moved or step.deferred)
        return output

    def seconds_until_sweep(self) -> float | None:
        """Seconds until the next pin ends; None without pins. The step loop wakes then, to end it."""
        state = self.state
        until = state.pins.next_end() if state.pins is not None else None
        return max(until - state.clock(), 0.0) if until is not None else None

    def turn_ended(self, job_id: str, request_id: str, tools: Sequence[str] | None) -> None:
        """The answer of a job's turn is complete and calls these tools. The turn stays pinned if they are expected to be quick."""
        state = self.state
        if state.pins is not None and state.pins.turn_ended(job_id, request_id, tools):
            state.settled = False

    def end_pins(self) -> None:
        """Ends every pin, and makes none from now on: the node is draining."""
        state = self.state
        if state.pins is not None:
            state.settled = state.settled and not state.pins.pinned
            state.pins.close()

    def _budget_of_prompts(self, budget: int) -> int:
        """Returns how many prompt tokens this step may compute: the whole budget, or fewer if that would take longer than
        `step_target_ms`. While requests decode, each of them waits for the step, so it keeps to the target. A step of
        idle work is shorter, because a request that comes waits for its end. Otherwise it takes some times as long: who is
        in it gets its first token, and who comes its turn, only when it ends."""
        state, fitting = self.state, self._pace.tokens
        if state.idle_work.fills_step and state.config.chunked_prefill:
            return min(budget, state.idle_work.prompt_tokens.most)
        if fitting >= budget or not state.config.chunked_prefill:
            return budget
        if self._decodes():
            return int(fitting)
        return min(budget, int(PROMPTS_ALONE * fitting))

    def _decodes(self) -> bool:
        return any(request.num_tokens - request.num_computed_tokens <= 1 for request in self.state.running)

    def _output_of(self, step: StepPlan) -> SchedulerOutput:
        state = self.state
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
            forced_req_ids=step.forced,
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
        if state.encoded is not None and step.num_scheduled:
            # A step without tokens does not reach the runner.
            output.encoder_inputs, output.forgotten_media = state.encoded.take_step()
        # The output keeps these sets.
        state.finished_req_ids, state.preempted_req_ids = set(), set()
        return output

    def _describe(self, request: Request) -> NewRequestData:
        return NewRequestData(
            req_id=request.request_id,
            facts=request.facts,
            token_ids=list(request.all_token_ids),
            block_ids=self.state.cache.block_ids(request.request_id),
            num_computed_tokens=request.num_computed_tokens,
            image_parts=request.image_parts,
        )

    def _advance(self, step: StepPlan) -> None:
        """Counts the step's tokens as computed, so that the next step can be planned. Rejected drafts are subtracted when the
        step is booked."""
        requests, of_prompts, encoded = self.state.requests, 0, self.state.encoded
        for request_id, num_tokens in step.num_scheduled.items():
            request = requests[request_id]
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                of_prompts += min(left, num_tokens)
            request.num_computed_tokens += num_tokens
            if encoded is not None and request.has_images:
                encoded.passed(request)
        self.state.totals.prompt_tokens_computed += of_prompts
        count_read(self.state, step.num_scheduled, exactly=of_prompts > 0)

    def leave_open(self, step: SchedulerOutput) -> bool:
        """Leaves `step`, the newest one, open if the next step may be planned before it is booked; returns whether it did. The
        caller must then plan the next step first and book `step` after that. Every request that `step` samples a token for
        counts a placeholder for it from here on."""
        return leave_open(self.state, step)

    def took(self, step: SchedulerOutput, seconds: float) -> None:
        """Notes how long the model needed for a step. The prompt budget of later steps follows from it."""
        if self._judge is not None:
            self._judge.took(step, seconds)
        if self.state.idle_work.fills_step:
            self._took_idle(step, seconds)
            return
        if made_here := sum(one.length for one in step.encoder_inputs if one.rows is None):
            # The vision tower took most of the time, so it says nothing about prompt tokens.
            self._tower_pace.took(made_here, seconds)
        elif step.num_prompt_tokens:
            self._pace.took(step.num_prompt_tokens, seconds)
            if self.state.connector is not None:
                self.state.connector.step_took(step.num_prompt_tokens, seconds)
        else:
            self.state.totals.decoded(1, seconds)

    def _took_idle(self, step: SchedulerOutput, seconds: float) -> None:
        """A step of idle work changes only its own limits, and none of what users' requests are planned and routed by."""
        work, read = self.state.idle_work, step.num_prompt_tokens
        self.state.totals.worked_idle(1, seconds, read)
        if not step.encoder_inputs:
            bound, count = (work.prompt_tokens, read) if read else (work.rows, step.total_num_scheduled_tokens)
            bound.took(count, seconds, IDLE_STEP * self.state.config.step_target_ms / 1000)

    def update_from_output(
        self, step: SchedulerOutput, model_output: ModelOutput, connector_output: ConnectorOutput | None = None
    ) -> list[TokenChunk]:
        """Books a step and returns the chunks to send. Transfers go first: a failed load makes some of the model's results
        wrong, and those must not be used."""
        state = self.state
        updates: list[TokenChunk] = []
        if connector_output is not None:
            if state.connector is not None:
                state.connector.update_connector_output(connector_output)
            if not connector_output.is_empty:
                updates = self._transfers.apply(connector_output)
        # From here on the step is booked: a request that ends now has nothing under way in it.
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
        """For a simulation: returns how many of the next steps give each running request one token and do nothing else."""
        return num_unchanged_steps(self.state)

    def take_unchanged_steps(self, steps: int, seconds: float) -> None:
        """Plans and books that many unchanged steps at once, which take `seconds` together. In each, every running request gets
        its newest token again."""
        take_unchanged_steps(self.state, steps)
        if self.state.idle_work.fills_step:
            self.state.totals.worked_idle(steps, seconds, 0)
        else:
            self.state.totals.decoded(steps, seconds)

    def lend_blocks(self, borrower: Request) -> Tables | None:
        """Allocates blocks for all tokens of a request that is never scheduled, or returns None if that would take more than
        half of the free blocks. The caller holds them until `take_blocks_back`. They are never cached."""
        state = self.state
        cache = state.cache
        most = cache.coordinator.max_blocks(borrower.num_tokens, borrower.num_tokens)
        if 2 * most > cache.pool.num_free or borrower.num_tokens >= state.max_model_len:
            return None
        none_found: Tables = [[] for _ in cache.coordinator.managers]
        blocks = cache.allocate_slots(borrower, borrower.num_tokens, hits=none_found, delay_caching=True)
        if blocks is not None:
            borrower.status = RequestStatus.FINISHED_ABORTED  # `held` takes only requests that have ended
            state.held[borrower.request_id] = borrower
        return blocks

    def take_blocks_back(self, borrower_id: str) -> None:
        self._lifecycle.release(borrower_id)

    def find_prefix(self, request: Request) -> tuple[Tables, int]:
        """Returns the cached blocks of the request's longest cached prefix, per group, and how many tokens they hold."""
        return self.state.cache.find_prefix(request)

    def convict(self, peer: PeerAddress | None) -> None:
        """KV from this peer is wrong; from a tier if None. Begins a new generation of the cache, counts against the peer, and tells
        it."""
        self._lifecycle.begin_generation()
        if self.state.connector is not None and peer is not None:
            self.state.connector.found_wrong(peer)

    def holds_blocks_of(self, request_id: str) -> bool:
        """Whether the request has ended while a connector still needs its blocks."""
        return request_id in self.state.held

    def has_unfinished_requests(self) -> bool:
        return bool(self.state.requests)

    def has_work(self) -> bool:
        """Whether a step could do anything now. False while every request waits for an event: the end of a transfer (its
        connector then wakes the engine), or blocks that a connector holds."""
        state = self.state
        if state.finished_req_ids or state.preempted_req_ids or state.open_step is not None:
            return True
        if state.connector is not None and state.connector.has_pending_work():
            return True
        return not state.settled and bool(state.running or state.waiting.num_ready or state.idle_work)

    def reset_prefix_cache(self) -> None:
        """Begins a new generation of the cache, here and where peers have copied from it."""
        self._lifecycle.begin_generation()

    @property
    def has_forgotten(self) -> bool:
        """Whether nothing of an earlier generation would be found again if the process ended now."""
        connector = self.state.connector
        return connector is None or connector.has_forgotten

    def tell_cache_events(self) -> None:
        """Records KV events from now on, for `take_cache_events`. Call it before the first request."""
        pool = self.state.cache.pool
        if pool.caching:
            groups = self.state.cache.coordinator.managers
            pool.events = CacheEvents(
                len(groups), untold=[group.index for group in groups if isinstance(group, StateTables)]
            )
            if self.state.connector is not None:
                self.state.connector.note_events()

    def take_cache_events(self) -> Sequence[KVEvent]:
        """Returns the KV events since the last call, for the device's cache and the connector's tiers."""
        events, connector = self.state.cache.pool.events, self.state.connector
        if events is None:
            return ()
        taken = events.take()
        of_tiers = list(connector.take_events()) if connector is not None else []
        return [*taken, *of_tiers] if of_tiers else taken

    def stats(self) -> SchedulerStats:
        """A snapshot of the counters. Walks over all unfinished requests."""
        return self.state.stats()

    def check_integrity(self) -> None:
        """Raises an InternalError when the scheduler's data contradict each other. Walks the whole pool."""
        check_integrity(self.state)
