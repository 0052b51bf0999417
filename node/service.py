"""The service of a node with an engine: it takes requests from routers, and returns token batches.

It knows no transport: messages arrive through `receive` and leave through a `RouterLine`. A role decides only which requests it
takes and how they end (`RoleRules`).

What may end a request, and which message its router gets:
- the engine (a stop token, the length, a failed transfer): its router gets a chunk with the finish reason;
- its deadline: its router gets a chunk with error `deadline_exceeded`;
- its router's Cancel, or the router's silence: no message, because the router wants none. A background answer
  (`Submit.keep`) goes on when its router is silent: other routers find it by its id;
- the failure of this node: every router gets an error chunk for each of its requests, then a status that says FAILED.

Messages arrive in order, and both ends notice a lost one (`wire.lines`). If messages may be lost for good, the node tells the
router which of its requests it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from tandem.base.errors import (
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    NodeLost,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem.engine.contract import NodeEngine
from tandem.engine.scheduling.state import SchedulerStats
from tandem.engine.tracing import FinishedTrace, Tracer
from tandem.node.answers import GIVEN_UP, KeptAnswers
from tandem.node.config import NodeConfig
from tandem.node.lifecycle import NodeLifecycle
from tandem.node.loop import Drain, EngineLoop, InStep, Item, ListRequests, Mailbox, ResetCache, RouterLost, SetAdapters
from tandem.node.requests import (
    LiveRequests,
    RoleRules,
    check_submit,
    failed_chunk,
    keeps_here,
    request_of,
    with_opening,
    writes_states_here,
)
from tandem.node.routers import CacheNewsSender, RouterLine
from tandem.node.status import counted, gauges, moved, worked
from tandem.node.wings import NodeWing, PartContext, Publish, ServicePart
from tandem.wire.nodes import NodeState
from tandem.wire.requests import (
    EMPTY_TABLE,
    Ask,
    CacheNews,
    Cancel,
    EndAnswer,
    Follow,
    ListCache,
    NodeCounters,
    NodeMemory,
    NodeStatus,
    Ping,
    Recall,
    Recalled,
    Submit,
    TokenBatch,
    TokenChunk,
    ToNode,
    TurnEnded,
)
from tandem.wire.tracing import NodeTrace

logger = logging.getLogger(__name__)

TellNews = Callable[[str, CacheNews], None]

_STATS_PERIOD_S = 0.1


class NodeService(NodeLifecycle):
    """Requests and answers belong to the step thread. The methods in the section "any thread" put items into its mailbox."""

    def __init__(
        self,
        config: NodeConfig,
        epoch: int,
        rules: RoleRules,
        engine: NodeEngine,
        mailbox: Mailbox[Item],
        line: RouterLine,
        clock: Callable[[], float] = time.monotonic,
        news: Callable[[TellNews, list[Publish]], CacheNewsSender | None] | None = None,
        wings: Iterable[NodeWing] = (),
        memory: Callable[[], NodeMemory | None] = lambda: None,
    ) -> None:
        """`news` builds the sender that tells routers, and the given publishers, what is cached; None: they are not told. `memory` says what
        the process has."""
        super().__init__(config, epoch, line, clock)
        self._rules = rules
        self._engine = engine
        self._mailbox = mailbox
        self._memory = memory
        self._eos = engine.info.eos_token_ids
        self._adapters = engine.adapters
        self._kept = KeptAnswers(config.answers, self._send_chunks, clock)
        self._live = LiveRequests()
        self._parts: list[ServicePart] = []
        try:
            self._add_parts(wings)
            publishers = [part.publish for part in self._parts if part.publish is not None]
            self._news = news(self._routers.tell, publishers) if news is not None else None
        except BaseException:
            self._stop_parts()
            raise
        self._scheduler_stats: SchedulerStats = engine.stats()
        self._stats_taken = clock()
        # When the mailbox was last read; and when it had been read at the time the stats were taken, so how old the stats are.
        self._read_at = self._stats_of = self._stats_taken
        self._quiet = threading.Event()  # set while no request is live and no block is held
        self._quiet.set()
        self._resets: list[ResetCache] = []  # that are done here, and not yet on every tier's disk
        self._tracer = Tracer(clock, engine.trace_of, self._send_trace)
        self.loop: EngineLoop[Item] = EngineLoop(engine, mailbox, self, clock, config.cores)

    def _add_parts(self, wings: Iterable[NodeWing]) -> None:
        context = PartContext(
            config=self._config,
            engine=self._engine,
            in_step=lambda run: self._mailbox.put(InStep(run)),
            fail=self._fail_request,
            clock=self._clock,
        )
        for wing in wings:
            if (part := wing.make(context)) is not None:
                self._parts.append(part)

    # --- any thread

    def start(self) -> None:
        self.loop.start()
        super().start()
        if self._news is not None:
            self._news.start()

    def _take(self, message: ToNode) -> None:
        if isinstance(message, ListCache):
            self._list_cache(message.reply_to)
        elif isinstance(message, Submit) and (failure := self._condition.failure) is not None:
            self._refuse(message, failure)
        else:
            if isinstance(message, Submit) and message.trace:
                self._tracer.arrived(message.request_id)
            self._mailbox.put(message)

    def _list_cache(self, reply_to: str) -> None:
        if self._news is not None:
            self._news.begin(reply_to)

    def _on_router_lost(self, reply_to: str) -> None:
        if self._news is not None:
            self._news.forget(reply_to)
        self._mailbox.put(RouterLost(reply_to))

    def router_replaced(self, reply_to: str) -> None:
        self._mailbox.put(RouterLost(reply_to))

    def _list_requests(self, reply_to: str) -> None:
        self._mailbox.put(ListRequests(reply_to, self._line.received(reply_to)))

    def status(self) -> NodeStatus:
        scheduler, transfer, now = self._scheduler_stats, self._engine.transfer_stats(), self._clock()
        own, adapters = moved(transfer), self._adapters
        own["malformed_frames"] += self.malformed_frames
        for part in self._parts:
            part.count(own)
        self.loop.watch_step()
        return self._reported(
            **gauges(scheduler, now),
            transfers=transfer.in_progress,
            step_age_s=self.loop.step_age(),
            counters=NodeCounters(
                **counted(scheduler),
                **worked(scheduler, self._engine.info.work),
                **own,
                steps=self.loop.steps,
                step_seconds=self.loop.step_seconds,
                line_gaps=self._line.gaps,
            ),
            tiers=tuple(transfer.tiers),
            left_out=tuple(transfer.left_out),
            adapters=(adapters.served if adapters is not None else None) or EMPTY_TABLE,
            replaced_adapters=(adapters.replaced if adapters is not None else None) or EMPTY_TABLE,
            age_s=0.0 if self.loop.has_read_all else max(0.0, now - self._stats_of),
            slower=self._engine.info.slower,
            sick=tuple(device for part in self._parts for device in part.sick),
            memory=self._memory(),
        )

    def _come_to_rest(self, timeout_s: float) -> bool:
        # A request may be in the mailbox. The step thread sets the event again after it has handled all that came before.
        self._quiet.clear()
        self._mailbox.put(Drain())
        if self._condition.state is NodeState.FAILED:
            self._quiet.set()
        return self._quiet.wait(timeout_s)

    def reset_cache(self, timeout_s: float) -> bool:
        """Drops all cached KV. Returns True once none of it would come back if the process ended now. Returns False if that takes longer
        than `timeout_s`: the running step is long, or a tier's disk does not answer. It is dropped all the same when they are done."""
        self._mailbox.put(reset := ResetCache(threading.Event()))
        return reset.done.wait(timeout_s)

    def set_adapters(self, read: list[Any], kept: frozenset[str], timeout_s: float) -> bool:
        """Serves the adapters in `read`, which the engine's book has read, and the served ones named in `kept`. Requests that were planned
        with replaced ones still find those. Returns False if the running step takes longer than `timeout_s`; the change is then made
        after that step. Raises ConfigurationError, and changes nothing, for an adapter that the engine does not take."""
        self._mailbox.put(change := SetAdapters(read, kept, Future()))
        try:
            change.done.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        if not self.loop.stop():
            logger.error("%s: the step thread did not end in time", self._config.node_id)
        super().stop()
        if self._news is not None:
            self._news.stop()
        self._stop_parts()

    def _stop_parts(self) -> None:
        for part in self._parts:
            part.stop()

    # --- the step thread (node.loop.LoopHost)

    def handle(self, item: Item) -> None:
        match item:
            case Submit():
                # The router may have been marked lost after it sent this. It is alive, so register it again.
                self._routers.heard(item.reply_to)
                try:
                    self._admit(item)
                except TandemError as error:
                    self._tracer.refused(item.request_id)
                    self._kept.end(item.request_id, error)
                    self._refuse(item, error)
            case Cancel():
                self._abort([id for id in item.request_ids if self._live.is_owner(id, item.reply_to)])
                self._kept.cancelled(item.request_ids)
            case RouterLost():
                owned = [live.submit for live in self._live.of_router(item.reply_to)]
                self._abort([submit.request_id for submit in owned if submit.keep is None])
                self._kept.router_lost(item.reply_to)
            case Recall():
                keep, broken = self._kept.recall(item.answer_id)
                found = Recalled(self._config.node_id, self._epoch, item.answer_id, keep, broken)
                self._routers.tell(item.reply_to, found)
            case Follow():
                self._kept.follow(item)
            case EndAnswer():
                self._end_answer(item)
            case ListRequests():
                self._tell_what_is_held(item)
            case TurnEnded():
                self._engine.turn_ended(item.job_id, item.request_id, item.called)
            case Drain():
                self._engine.wind_down()
            case ResetCache():
                self._engine.reset_prefix_cache()
                self._resets.append(item)
            case SetAdapters():
                self._set_adapters(item)
            case InStep():
                item.run()
            case Ping() | Ask() | ListCache():
                pass  # `receive` answers these, and puts none of them into the mailbox

    def before_step(self, now: float) -> None:
        self._read_at = now
        if self._resets and self._engine.has_forgotten:
            for reset in self._resets:
                reset.done.set()
            self._resets.clear()
        for part in self._parts:
            part.before_step(now)
        for live in self._live.overdue(now):
            late = DeadlineExceeded(f"the request did not finish within its {live.submit.timeout_s:.1f} s on this node")
            self._abort([live.submit.request_id], late)
            self._refuse(live.submit, late)

    def seconds_until_due(self, now: float) -> float | None:
        dues = (
            self._live.seconds_until_due(now),
            self._engine.seconds_until_due(),
            *(part.seconds_until_due(now) for part in self._parts),
            self._adapters.seconds_until_look(now) if self._adapters is not None else None,
        )
        return min((due for due in dues if due is not None), default=None)

    def publish(self, updates: list[TokenChunk]) -> None:
        batches: defaultdict[str, list[TokenChunk]] = defaultdict(list)
        for update in updates:
            if (live := self._live.get(update.request_id)) is None:
                continue
            live.reported = max(live.reported, update.start + len(update.token_ids))
            if update.finish is not None:
                self._live.end(update.request_id)
                logger.debug("%s: ended as %s", update.request_id, update.finish.value)
                update.finish = self._rules.finish_of(live.submit, update)
            if live.submit.keep is not None:
                self._kept.add(update)
            batches[live.submit.reply_to].append(update)
        for reply_to, chunks in batches.items():
            self._send_chunks(reply_to, chunks)
        self._end_traces(update.request_id for update in updates if update.finish is not None)

    def after_step(self, progressed: bool) -> None:
        if self._news is not None and (events := self._engine.take_cache_events()):
            self._news.happened(events)
        if self._engine.tracer is not None and not self._tracer.active:
            self._engine.tracer = None
        if not progressed and self._engine.use_idle_time():
            self._mailbox.wake()  # do not sleep: look for requests, then continue the idle work
        now = self._clock()
        # The stats walk over all running requests, so take them at most once per period, but always before the loop sleeps.
        if progressed and now - self._stats_taken < _STATS_PERIOD_S:
            return
        self._stats_taken, self._stats_of = now, self._read_at
        self._forget_adapters()
        self._scheduler_stats = stats = self._engine.stats()
        if not self._live and stats.free_blocks == stats.total_blocks:
            self._quiet.set()

    def failed(self, error: BaseException) -> None:
        failed = self._condition.fail(error)
        self._quiet.set()  # a drain must not wait for a failed node
        if isinstance(failed, NodeLost):
            self._routers.tell_all_status()  # first, so that no router retries these requests here
        self._kept.end_all(failed)
        failure = failed.to_wire()
        for live in self._live:
            self._send_chunks(live.submit.reply_to, [failed_chunk(live.submit, failure)])
        self._live.clear()
        self._routers.tell_all_status()

    # --- helpers, in the step thread

    def _admit(self, submit: Submit) -> None:
        if (state := self._condition.state) is not NodeState.READY:
            raise Unavailable(f"node {self._config.node_id} is {state.value} and takes no new request")
        if submit.transfer is not None and self._config.transfer is None:
            raise InvalidRequest(f"node {self._config.node_id} has no peers and cannot take part in a transfer")
        check_submit(
            submit,
            self._engine.info,
            adapters=self._adapters,
            writes_hidden_states=bool(self._config.engine.model.hidden_states_folder),
            follows_grammars=self._engine.follows_grammars,
        )
        if self._engine.states_wait and writes_states_here(submit):
            raise Overloaded("hidden_states: the folder takes files more slowly than they come; try again later")
        if (rules := self._engine.info.encoder) is not None:
            submit = with_opening(submit, rules)
        now = self._clock()
        if submit.lora is not None and self._adapters is not None:
            self._adapters.asked_for(submit.lora, now)
        request = request_of(submit, self._rules.sampling_for(submit), now, self._eos)
        if keeps_here(submit):
            self._kept.begin(submit)
        for part in self._parts:
            part.prepare(request)
        self._engine.add_request(request)
        self._live.begin(submit, now)
        for part in self._parts:
            part.admitted(request, submit, now)
        logger.debug("%s: taken, %d tokens", submit.request_id, request.num_tokens)
        self._quiet.clear()
        if submit.trace:
            self._tracer.admitted(submit)
            self._engine.tracer = self._tracer

    def _fail_request(self, request_id: str, error: TandemError) -> None:
        if (live := self._live.end(request_id)) is not None:
            self._engine.fail_request(request_id, error)
            self._kept.end(request_id, error)
            self._refuse(live.submit, error)
            self._end_traces([request_id])

    def _set_adapters(self, item: SetAdapters) -> None:
        if self._adapters is not None:
            try:
                self._adapters.serve(item.read, item.kept, self._clock())
            except ConfigurationError as error:
                item.done.set_exception(error)
                return
            self._forget_adapters()
        item.done.set_result(None)
        self._routers.tell_all_status()

    def _forget_adapters(self) -> None:
        """Forgets adapters that are no longer served, nor used by a request or a canary check, nor kept because they were replaced."""
        if self._adapters is not None and self._adapters.has_others:
            used = {live.submit.lora for live in self._live if live.submit.lora is not None}
            if (lora := self._engine.lora_in_check) is not None:
                used.add(lora)
            self._adapters.forget_others(used, self._clock())

    def _refuse(self, submit: Submit, error: TandemError) -> None:
        self._send_chunks(submit.reply_to, [failed_chunk(submit, error.to_wire())])

    def _tell_what_is_held(self, item: ListRequests) -> None:
        held = {live.submit.request_id: live.reported for live in self._live.of_router(item.reply_to)}
        self._tell_holding(item.reply_to, item.position, held)

    def _end_answer(self, item: EndAnswer) -> None:
        """Ends a background answer. Any router may ask for this; the router that submitted the request is told of its end."""
        error = item.error.to_exception()
        request_id = self._kept.request_of(item.answer_id)
        live = self._live.get(request_id) if request_id is not None else None
        if live is not None:
            self._abort([live.submit.request_id], error)
            self._refuse(live.submit, error)
        self._kept.settle(item.answer_id, error)
        if item.forget:
            self._kept.forget(item.answer_id)

    def _abort(self, request_ids: list[str], why: TandemError = GIVEN_UP) -> None:
        for request_id in request_ids:
            self._live.end(request_id)
            self._kept.end(request_id, why)
            for part in self._parts:
                part.forget(request_id)
        self._engine.abort_requests(request_ids)
        self._end_traces(request_ids)

    def _end_traces(self, request_ids: Iterable[str]) -> None:
        """Called after the requests' tokens are sent, so that tokens never wait for a trace."""
        if self._engine.tracer is not None:
            for request_id in request_ids:
                self._tracer.ended(request_id, is_held=self._engine.holds_blocks_of(request_id))

    def _send_trace(self, done: FinishedTrace) -> None:
        submit = done.submit
        trace = NodeTrace(self._config.node_id, self._epoch, submit.request_id, done.spans, done.dropped, done.transfer)
        self._routers.tell(submit.reply_to, trace)

    def _send_chunks(self, reply_to: str, chunks: list[TokenChunk]) -> None:
        self._routers.tell(reply_to, TokenBatch(node_id=self._config.node_id, epoch=self._epoch, chunks=chunks))
