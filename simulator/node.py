"""A simulated node: the product's scheduler and block pool, without a model. A step takes the time that the costs give.

A run of steps in which every running request gets its next token is simulated with one timer, as long as nothing else happens. When
something does (a request comes, KV arrives, a router asks for the status), the node catches up: it books the ended steps together, and
plans the step under way as of the time when it began. So whenever the scheduler is read, it is as it would be after single steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable

import msgspec

from tandem.base.errors import InternalError, RequestError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.state import SchedulerStats
from tandem.node.requests import RoleRules
from tandem.node.status import counted, gauges
from tandem.simulator.costs import CostModel, DecodeRun, StepBound
from tandem.simulator.machine import SharedMachine
from tandem.simulator.network import Network, Port, SimulatedConnector
from tandem.simulator.outcome import AnswerLog, NodeLoad
from tandem.simulator.traffic import NameHasher, next_token
from tandem.wire.nodes import NodeInfo, NodeState
from tandem.wire.requests import Cancel, NodeCounters, NodeStatus, Submit, TokenBatch, TokenChunk, TurnEnded
from tandem.wire.sampling import FinishReason

# A router gets an answer's first and last tokens at once, and the tokens in between at least this often.
REPORT_S = 5.0
# When the scheduler has work but planned nothing, the node asks it again after this time, as `node.loop` does.
ASK_AGAIN_S = 0.005


@dataclasses.dataclass(slots=True)
class NextLook:
    """The next time at which nodes are asked for their status. A step that ends before then needs no statistics of its beginning."""

    at: float = -math.inf  # unknown: every step needs them


@dataclasses.dataclass(slots=True)
class _LiveRequest:
    request: Request
    submit: Submit
    reported: int = 0
    reported_at: float = 0.0


class SimulatedNode:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        info: NodeInfo,
        rules: RoleRules,
        costs: CostModel,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        network: Network,
        outcome: AnswerLog,
        tell: Callable[[TokenBatch], None],
        next_look: NextLook | None = None,
        *,
        machine: SharedMachine | None = None,
        by_steps: bool = False,
    ) -> None:
        """`machine`: None if the node has one of its own. `by_steps`: simulate every step alone, and never a run of steps at once."""
        self.info = info
        self.state = NodeState.READY
        self.born_at = loop.time()
        self._loop = loop
        self._rules = rules
        self._costs = costs
        self._learnt = costs.learnt()
        self._outcome = outcome
        self._network = network
        self._tell = tell
        self._next_look = next_look or NextLook()
        self._machine = machine
        # How many times as long as on a machine of its own the step under way takes: while another node computes there, and now
        self._slowdown, self._pace = 1.0, 1.0
        self._by_steps = by_steps
        self._port = Port(self._wake)
        self._connector = SimulatedConnector(network, self._port) if rules.role.hands_over else None
        self.scheduler = Scheduler(
            scheduler,
            cache,
            (KVCacheGroup(AttentionKind.FULL, info.block_size, (0,)),),
            costs.blocks,
            info.max_model_len,
            connector=self._connector,
            clock=loop.time,
        )
        self._hasher = NameHasher(info.block_size)
        self._live: dict[str, _LiveRequest] = {}
        self._inbox: list[Submit | Cancel | TurnEnded] = []
        self._plan: SchedulerOutput | None = None  # the plan of the step under way
        self._plan_s = 0.0
        self._run: DecodeRun | None = None  # a run of steps under way, none of them planned
        self._run_began = 0.0
        self._plan_began = 0.0
        self._run_taken = 0
        # The statistics at the beginning of the step under way; None if the step ends before the next status.
        self._stats: SchedulerStats | None = None
        # The counters made of `_stats`; None until a status needs them
        self._counters: NodeCounters | None = None
        self._longest = 1  # tokens of the longest request so far, with its whole answer
        self._bound = StepBound(costs, scheduler.max_num_batched_tokens)
        self._timer: asyncio.Handle | None = None
        self._is_turning = False
        self._status: NodeStatus | None = None  # the last status; None when something has changed since
        self._steps = 0
        self._busy_s = self._busy_before = 0.0
        self._counted_from = self.born_at
        self._requests = 0
        self._most_blocks = 0.0
        self._last_arrival = 0.0

    # --- what comes in

    def deliver(self, message: Submit | Cancel | TurnEnded) -> None:
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        self._status = None
        if self._is_turning:
            return  # `_go_on` reads the inbox again before it ends
        if self._run is not None:
            self.catch_up()
        elif self._timer is None:
            self._timer = self._loop.call_soon(self._go_on)

    def catch_up(self) -> None:
        """Brings the scheduler to the state that it would have now after single steps."""
        run = self._run
        if run is None:
            return
        over = self._take_over_steps(run)
        if over < run.steps:
            if self._timer is not None:
                self._timer.cancel()
            self._run = None
            began = self._run_began + run.seconds(over)
            seconds = run.seconds(over + 1) - run.seconds(over)
            plan = self._planned(began + seconds)
            self._begin(plan, began, seconds)

    def _take_over_steps(self, run: DecodeRun) -> int:
        """Books the steps of the run that have ended, and returns how many have."""
        over = run.ended_by(self._loop.time() - self._run_began)
        self._take(run, over)
        return over

    def _take(self, run: DecodeRun, over: int) -> None:
        steps = over - self._run_taken
        if steps:
            ids = [request.request_id for request in self.scheduler.running]
            self._outcome.on_run(ids, self._run_began, run, self._run_taken, over)
            seconds = run.seconds(over) - run.seconds(self._run_taken)
            self.scheduler.take_unchanged_steps(steps, seconds)
            self._steps += steps
            self._busy_s += seconds
            self._run_taken = over
            self._status = None

    # --- steps

    def _go_on(self, ended: SchedulerOutput | None = None) -> None:
        """Books the ended step, if any, and begins the next one if there is work."""
        self._timer, self._is_turning = None, True
        if ended is not None:
            self._end_step(ended)
        while self._begin_next():
            pass
        self._is_turning = False
        if self._machine is not None:
            is_busy = self._plan is not None or self._run is not None
            self._machine.note(self, self._slowdown if is_busy else None)

    def _begin_next(self) -> bool:
        """Returns False when a step is under way or the node has nothing to do; True to be called again."""
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            if isinstance(message, Submit):
                self._add(message)
            elif isinstance(message, Cancel):
                self._cancel(message)
            else:
                self.scheduler.turn_ended(message.job_id, message.request_id, message.called)
        now = self._loop.time()
        if not self._by_steps and self._port.output.is_empty:
            steps = self.scheduler.num_unchanged_steps()
            if steps > 1:
                self._set_pace(None)
                self._begin_run(steps, now)
                return False
        plan = self._planned(now + self._longest_step_s())
        if plan.total_num_scheduled_tokens:
            self._begin(plan, now, self._seconds_of(plan))
            return False
        progressed = self._book(plan, ModelOutput({}))
        if not (progressed or self._inbox) and self.scheduler.has_work():
            self._timer = self._loop.call_later(ASK_AGAIN_S, self._go_on)
            return False
        return progressed or bool(self._inbox)

    def _planned(self, ends_by: float) -> SchedulerOutput:
        """Plans a step that ends by `ends_by`, after noting the statistics: a node answers with these during the step."""
        # On a shared machine a step may end later than planned.
        is_needed = ends_by >= self._next_look.at or self._machine is not None
        self._stats = self.scheduler.stats() if is_needed else None
        self._counters = None
        return self.scheduler.schedule()

    def _longest_step_s(self) -> float:
        """An upper bound on the time of the next step."""
        requests = self.scheduler.requests
        reads = any(request.num_tokens - request.num_computed_tokens > 1 for request in requests.values())
        return self._bound.of(len(requests), self._longest, reads)

    def _begin_run(self, steps: int, now: float) -> None:
        requests = self.scheduler.running
        context = sum(request.num_computed_tokens for request in requests)
        run = DecodeRun(self._costs, len(requests), context, steps, self._pace)
        pin_ends_in = self.scheduler.seconds_until_sweep()
        if pin_ends_in is not None and pin_ends_in < run.seconds(steps - 1):
            # End the run at the first step that begins when the pin has ended: its plan may use the pin's blocks.
            before = run.ended_by(pin_ends_in)
            run.steps = before if before and run.seconds(before) == pin_ends_in else before + 1
        self._run = run
        self._run_began, self._run_taken = now, 0
        self._timer = self._loop.call_at(now + run.seconds(run.steps), self._on_run_end)

    def _on_run_end(self) -> None:
        self._timer = None
        run, self._run = self._run, None
        if run is not None:
            self._take(run, run.steps)
            self._report_quiet()
        self._go_on()

    def _begin(self, plan: SchedulerOutput, began: float, seconds: float) -> None:
        self._plan, self._plan_began, self._plan_s = plan, began, seconds
        self._status = None
        self._timer = self._loop.call_at(began + seconds, self._go_on, plan)

    def on_pace(self, pace: float) -> None:
        """What is left of the step under way takes more or less time from now on."""
        if pace == self._pace:
            return
        self.catch_up()
        before, self._pace = self._pace, pace
        if self._plan is not None and self._timer is not None:
            self._timer.cancel()
            now = self._loop.time()
            left = max(self._plan_began + self._plan_s - now, 0.0) * pace / before
            self._begin(self._plan, self._plan_began, now + left - self._plan_began)

    def _set_pace(self, reads_s: float | None) -> None:
        """`reads_s`: the seconds that the step takes alone, if it reads a prompt."""
        if self._machine is not None:
            self._slowdown = self._costs.beside.of(self.info.role, reads_s)
            self._pace = self._machine.pace(self, self._slowdown)

    def _seconds_of(self, plan: SchedulerOutput) -> float:
        """Returns the seconds of a step that begins now, and sets the pace at which it does."""
        chunks: list[tuple[int, int]] = []
        decodes, context = 0, 0
        requests = self.scheduler.requests
        for request_id, count in plan.num_scheduled_tokens.items():
            before = requests[request_id].num_computed_tokens - count
            if count == 1 and before + 1 > requests[request_id].num_prompt_tokens:
                decodes += 1
                context += before
            else:
                chunks.append((count, before))
        seconds = self._costs.step_s(chunks, decodes, context)
        self._set_pace(seconds if chunks else None)
        return seconds * self._pace

    def _end_step(self, plan: SchedulerOutput) -> None:
        self._plan = None
        requests = self.scheduler.requests
        sampled = {
            request_id: [next_token(request)]
            for request_id in plan.num_scheduled_tokens
            if (request := requests.get(request_id)) is not None and request.num_computed_tokens == request.num_tokens
        }
        self._steps += 1
        self._busy_s += self._plan_s
        self.scheduler.took(plan, self._plan_s)
        self._book(plan, ModelOutput(sampled))

    def _book(self, plan: SchedulerOutput, output: ModelOutput) -> bool:
        """Updates the scheduler with a step's results and publishes them. Returns whether anything has changed."""
        transfers = self._port.take()
        sending = self._sending_of(plan)
        updates = self.scheduler.update_from_output(plan, output, transfers)
        for request_id, (name, tokens) in sending.items():
            first = output.sampled_token_ids.get(request_id)
            self._network.computed(name, self._port, request_id, tokens, first[0] if first else None)
        self._publish(updates)
        self._status = None
        return bool(plan.total_num_scheduled_tokens or plan.preempted_req_ids or updates or transfers is not None)

    def _sending_of(self, plan: SchedulerOutput) -> dict[str, tuple[str, int]]:
        if self._connector is None:
            return {}
        requests = self.scheduler.requests
        return {
            request_id: (name, requests[request_id].num_computed_tokens)
            for request_id in plan.num_scheduled_tokens
            if request_id in requests and (name := self._connector.sending(request_id)) is not None
        }

    # --- requests

    def _add(self, submit: Submit) -> None:
        request = Request(
            submit.request_id,
            msgspec.structs.replace(submit, sampling=self._rules.sampling_for(submit)),
            output_token_ids=submit.output_token_ids,
            arrival_time=self._arrival_time(),
            transfer=submit.transfer,
            block_hasher=self._hasher,
        )
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            chunk = TokenChunk(
                submit.request_id, len(submit.output_token_ids), [], FinishReason.ERROR, error=error.to_wire()
            )
            self._send([chunk])
            return
        self._requests += 1
        self._longest = max(self._longest, request.length_limit)
        self._live[submit.request_id] = _LiveRequest(request, submit, len(submit.output_token_ids), self._loop.time())

    def _arrival_time(self) -> float:
        """The current time, made unique: with equal times the scheduler would order requests by their ids, which are random."""
        self._last_arrival = max(self._loop.time(), math.nextafter(self._last_arrival, math.inf))
        return self._last_arrival

    def _cancel(self, cancel: Cancel) -> None:
        for request_id in self.scheduler.finish_requests(cancel.request_ids, RequestStatus.FINISHED_ABORTED):
            self._live.pop(request_id, None)

    def _publish(self, updates: list[TokenChunk]) -> None:
        now = self._loop.time()
        chunks: list[TokenChunk] = []
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            finish = self._rules.finish_of(live.submit, update)
            hears = update.cached_tokens is not None or finish is not None or now - live.reported_at > REPORT_S
            if update.token_ids and not (self._rules.role.writes_answers and self._is_handoff(live, update)):
                for _ in update.token_ids:
                    self._outcome.on_token(update.request_id, now)
            if hears:
                chunks.append(self._chunk(live, update, finish, now))
            if finish is not None:
                del self._live[update.request_id]
        if chunks:
            self._send(chunks)

    @staticmethod
    def _is_handoff(live: _LiveRequest, update: TokenChunk) -> bool:
        """Whether this update repeats the first token, which the prefill node has already sent to the client."""
        return update.cached_tokens is not None and live.submit.transfer is not None

    @staticmethod
    def _chunk(live: _LiveRequest, update: TokenChunk, finish: FinishReason | None, now: float) -> TokenChunk:
        request, start = live.request, live.reported
        tokens = request.all_token_ids[request.num_prompt_tokens + start : request.num_tokens]
        live.reported, live.reported_at = start + len(tokens), now
        return TokenChunk(
            update.request_id,
            start,
            tokens,
            finish,
            stop_token=update.stop_token,
            error=update.error,
            cached_tokens=update.cached_tokens,
        )

    def _report_quiet(self) -> None:
        """Reports tokens to routers for answers whose steps were simulated at once, if the last report is older than `REPORT_S`."""
        now = self._loop.time()
        chunks = [
            self._chunk(live, TokenChunk(request_id, live.reported, []), None, now)
            for request_id, live in self._live.items()
            if now - live.reported_at > REPORT_S and live.request.num_output_tokens > live.reported
        ]
        if chunks:
            self._send(chunks)

    def _send(self, chunks: list[TokenChunk]) -> None:
        self._tell(TokenBatch(self.info.node_id, self.info.epoch, chunks))

    # --- how it stands

    @property
    def is_idle(self) -> bool:
        return not (self._live or self._inbox or self._port.under_way or self.scheduler.has_unfinished_requests())

    def held(self) -> dict[str, int]:
        """The requests that this node holds, including those still in the inbox, and how many tokens of each it has reported."""
        come = {message.request_id: 0 for message in self._inbox if isinstance(message, Submit)}
        return come | {request_id: live.reported for request_id, live in self._live.items()}

    def status(self) -> NodeStatus:
        """The status that the node sends to routers."""
        if self._run is not None:
            self._take_over_steps(self._run)
        if self._status is not None:
            return self._status
        self._report_quiet()
        stats = self._stats if self._plan is not None else self.scheduler.stats()
        if stats is None:
            raise InternalError(f"{self.info.node_id} was asked how it stands at a moment that it was not told of")
        counters = self._counters if self._plan is not None else None
        if counters is None:
            counters = self._counters = NodeCounters(
                **counted(stats), steps=self._steps, step_seconds=self._busy_s, step_costs=self._learnt
            )
        age_s = 0.0 if self._plan is None else self._loop.time() - self._plan_began
        self._status = status = NodeStatus(
            self.info.node_id,
            self.info.role,
            self.info.epoch,
            self.state,
            transfers=self._port.under_way,
            step_age_s=age_s,
            age_s=age_s,
            counters=counters,
            **gauges(stats, self._loop.time()),
        )
        self._most_blocks = max(self._most_blocks, 1 - stats.free_blocks / stats.total_blocks)
        if self._plan is not None:
            self._status = None  # do not keep it: the age of the step changes
        return status

    def count_from_here(self) -> None:
        """What the node has computed so far is not in its share of busy time."""
        self.catch_up()
        self._counted_from, self._busy_before = self._loop.time(), self._busy_s

    def load(self) -> NodeLoad:
        self.catch_up()
        stats = self.scheduler.stats()
        seconds, counted = self._loop.time() - self.born_at, self._loop.time() - self._counted_from
        return NodeLoad(
            node_id=self.info.node_id,
            role=self.info.role.value,
            seconds=seconds,
            busy=min(1.0, (self._busy_s - self._busy_before) / counted) if counted > 0 else 0.0,
            requests=self._requests,
            prompt_tokens_computed=stats.prompt_tokens_computed,
            prompt_tokens_cached=stats.prompt_tokens_cached,
            output_tokens=stats.output_tokens,
            preemptions=stats.preemptions,
            most_blocks=self._most_blocks,
        )
