"""One request from its first submission to its one end, over as many nodes as it takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KVLoadFailed,
    NodeLost,
    Overloaded,
    TandemError,
    TransferError,
    Unavailable,
)
from tandem.router.dispatch.ledger import MergedChunk, RequestTimings, TokenLedger
from tandem.router.dispatch.node_choice import NodeChoice
from tandem.router.dispatch.placement import Attempt, Placement, Ring, TokenSource
from tandem.router.dispatch.reports import PromptReports
from tandem.router.policy.views import RoutingDecision
from tandem.router.prefixes import PromptHashes
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import Holding, TokenChunk
from tandem.wire.sampling import FinishReason, TokenLogprobs

logger = logging.getLogger(__name__)


class LeftBehind(Unavailable):
    """This router ends while the nodes go on with the answer, which another router can find."""


class TokensDiffer(TransferError):
    """Two nodes computed different first tokens, and no failover is left to go on from the one that was shown."""

    code = "tokens_differ"


# Looked up once instead of with every token.
_NEWS, _DIFFERS = MergedChunk.NEWS, MergedChunk.DIFFERS

_LOOK_AGAIN_S = 1.0  # until the next look for a node with room


def _hears_nothing(life: RequestLife, computed: int = 0) -> None:
    pass


class RequestLife:
    """Runs on the event loop, and nothing here awaits. `ended` becomes true exactly once.

    `on_news` is called when there are tokens to read and once more at the end; `on_end` is called once, at
    the end.
    """

    def __init__(
        self,
        placement: Placement[RequestLife],
        spec: SequenceSpec,
        hashes: PromptHashes,
        on_news: Callable[[RequestLife], None],
        on_end: Callable[[RequestLife], None],
        came: float | None = None,
    ) -> None:
        """`came`: when the request began to wait for a place."""
        self._placement = placement
        self._metrics = placement.metrics
        self._timeouts = placement.config.timeouts
        self._clock = placement.clock
        self._on_news = on_news
        self._on_end = on_end
        # Called with each attempt's first token, and how many tokens of the prompt were computed for it.
        self.on_read: Callable[[RequestLife, int], None] = _hears_nothing
        self.on_begun: Callable[[RequestLife], None] = _hears_nothing  # called with the first token
        self.spec = spec
        self._hashes = hashes
        self.ledger = TokenLedger(wants_logprobs=spec.facts.sampling.logprobs is not None)
        self.timings = RequestTimings(placement.metrics, placement.clock, spec, came)
        self._reports = PromptReports(placement, spec, self.timings)
        # The result when `spec.facts.pooling` asks for one; None until the request has ended well.
        self.vector: bytes | None = None
        self.attempt: Attempt | None = None
        self.decisions: list[RoutingDecision] = []
        self.request_ids: list[str] = []  # its names on the nodes, one per attempt
        self.failovers = 0
        self.finish: FinishReason | None = None
        self.error: TandemError | None = None
        self.ended = False
        self._nodes = NodeChoice(placement, spec, hashes, self.ledger)
        self._waiting_since: float | None = None  # since when it has had no node
        self._paused = False  # it waits for a place
        self._last_failure: TandemError | None = None
        self._broke_a_node = False
        self._alarms: dict[Ring, None] = {}  # the alarms of its tick, its own among them

    @property
    def cached_tokens(self) -> int | None:
        """How many prompt tokens were found in a cache. None until a node has said."""
        return self.timings.cached_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        return self._reports.prompt_logprobs

    # --- its course -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Submits the first attempt. Raises Unavailable when no node can take it; then it never began."""
        self._attempt(self._nodes.choose())

    def cancel(self) -> None:
        """The owner no longer wants the answer. Idempotent."""
        self._end(FinishReason.ABORT, Cancelled("the client went away"))

    def stop(self) -> None:
        """The owner has all that it wants: a stop string is complete."""
        self._end(FinishReason.STOP, None)

    @property
    def can_pause(self) -> bool:
        """Whether it can give its place up and go on later: not a background answer, which other routers may be
        reading from its node, and nothing that ends soon."""
        spec = self.spec
        return not (
            self.ended
            or self._paused
            or spec.keep is not None
            or spec.facts.pooling is not None
            or len(self.ledger.tokens) >= spec.facts.sampling.max_tokens
        )

    def pause(self) -> None:
        """Leaves its nodes. `try_again` goes on from the tokens that are known."""
        logger.info("%s: pauses for another key after %d tokens", self.spec.label, len(self.ledger.tokens))
        self._abandon_attempt()
        self._placement.lives.stop_waiting(self)
        self._waiting_since = None
        self._paused = True
        self.ledger.drop_held()
        self._arm()

    def fail(self, error: TandemError) -> None:
        self._end(FinishReason.ERROR, error)

    def turn_ended(self, called: list[str] | None) -> None:
        """Tells the pinning nodes which tools the answer of this turn called. Does nothing for a request that
        is not a turn of a job, is the job's last step, or ended badly."""
        spec, well = self.spec, self.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if spec.facts.job_id is not None and not spec.facts.is_last_step and well and self.decisions:
            self._placement.turn_ended(self.decisions[-1], self.request_ids[-1], spec.facts.job_id, called)

    def leave(self, error: TandemError) -> None:
        """This router ends. If nodes keep the answer, they go on, and other routers find it."""
        if self.spec.keep is None:
            self.fail(error)
        else:
            self._end(FinishReason.ERROR, LeftBehind(str(error)), leaves=True)

    def on_chunk(self, node_id: str, epoch: int, chunk: TokenChunk) -> None:
        attempt = self.attempt
        source = attempt.source(node_id, epoch) if attempt is not None else None
        if attempt is None or source is None:
            self._metrics.foreign_chunks.inc()
            return
        finish = chunk.finish
        if finish is not None and (finish is FinishReason.ERROR or finish is FinishReason.ABORT):
            self._on_node_error(attempt, source, chunk)
            return
        had = len(self.ledger.tokens)
        merged = self.ledger.accept(chunk)
        if merged is _DIFFERS:
            self._on_difference(attempt, source)
            return
        self._reports.note(attempt, source, chunk)
        if len(self.ledger.tokens) > had:
            self._note_tokens(attempt, len(self.ledger.tokens) - had)
            if self.spec.trace is not None:
                self.spec.trace.arrived(self._clock(), node_id, len(self.ledger.tokens) - had)
        if chunk.vector is not None:
            self.vector = chunk.vector
        elif self.spec.facts.pooling is not None and self.ledger.finish is not None:
            self.fail(InternalError("the node ended a request for a vector without one"))
            return
        if self.ledger.finish is not None:
            self._end(self.ledger.finish, None, ended_at=attempt.node(source))
        elif merged is _NEWS:
            self._on_news(self)

    def _on_difference(self, attempt: Attempt, source: TokenSource) -> None:
        """Both nodes computed the attempt's first token, and rounding made them differ. The first report
        stays. If the late report is the decode node's, its answer continues from a token that was not shown:
        the request fails over and continues from the known one. When no failover is left, it fails: the rest
        would belong to another answer than its beginning."""
        self._metrics.token_mismatches.inc()
        logger.warning("%s: two nodes differ in a token (%s)", self.spec.label, attempt.decision.node_names)
        if source is TokenSource.PREFILL:
            attempt.prefill_reported = True
        else:
            prefill = {attempt.prefill} if attempt.prefill is not None else set()
            self._fail_over(
                TokensDiffer("two nodes differ in a token, and the answer cannot go on from the one that was shown"),
                prefill,
            )

    def _note_tokens(self, attempt: Attempt, count: int) -> None:
        attempt.alive_at = now = self.timings.tokens(count)
        if attempt.first_token_at is None and (computed := self._reports.first_token(attempt, now)) is not None:
            self.on_read(self, computed)
            if attempt.base == 0:
                self.on_begun(self)

    # --- failures ---------------------------------------------------------------------------------------------

    def on_node_lost(self, node: NodeInfo, why: str) -> None:
        attempt = self.attempt
        if attempt is None or self.ended:
            return
        if node not in attempt.nodes or (node == attempt.prefill and self._handed_over(attempt)):
            return
        self._fail_over(NodeLost(f"node {node.node_id} is lost: {why}"), {node})

    def on_unheard(self, node: NodeInfo) -> None:
        """The node sends messages but acknowledges none. A request that it did receive stays there."""
        attempt = self.attempt
        if attempt is not None and not self._placement.has_heard(node, attempt):
            self.on_node_lost(node, "it does not receive what it is sent")

    def on_holding(self, node: NodeInfo, holding: Holding) -> None:
        """The node lists what it holds. If this request, or tokens of it, are missing, it fails over."""
        attempt = self.attempt
        sent = attempt.sent.get(node) if attempt is not None else None
        if attempt is None or sent is None or self.ended:
            return
        reported = holding.requests.get(attempt.request_id)
        is_prefill = node == attempt.prefill
        if reported is None:
            if sent > (holding.line, holding.number):
                return  # the node listed its requests before it read this Submit
            if is_prefill and (self._handed_over(attempt) or attempt.prefill_reported):
                return
            self._fail_over(NodeLost(f"node {node.node_id} no longer has the request"), ())
        elif not is_prefill and reported > self.ledger.reported:
            self._fail_over(NodeLost(f"tokens from node {node.node_id} are lost"), ())
        else:
            if node in attempt.unanswered:
                attempt.unanswered.discard(node)
                if not attempt.unanswered:
                    attempt.alive_at = self._clock()
            if not is_prefill:
                self._look_for_room(attempt, node)

    def _look_for_room(self, attempt: Attempt, node: NodeInfo) -> None:
        """Leaves a node that keeps its blocks for a silent peer, if another one has room; else it soon looks again."""
        attempt.found_no_room_at = None
        if not self._placement.waits_for_silent_peers(node):
            return
        if self._nodes.has_room_besides(node):
            why = f"{node.node_id} keeps its blocks until a silent peer can no longer write to them"
            self._fail_over(Overloaded(why), {node}, for_now=True)
        else:
            attempt.found_no_room_at = self._clock()
            self._arm()

    def _handed_over(self, attempt: Attempt) -> bool:
        """Whether the decode node has all the KV and this router has every token reported so far: the prefill
        node no longer matters then."""
        return attempt.prefill is not None and attempt.decode_started and not self.ledger.waiting

    def _on_node_error(self, attempt: Attempt, source: TokenSource, chunk: TokenChunk) -> None:
        if source is TokenSource.PREFILL and self._handed_over(attempt):
            logger.info("%s: after the handover, the prefill node reports %s", self.spec.label, chunk.error)
            return
        if source is TokenSource.PREFILL and chunk.finish is FinishReason.ABORT:
            self._reports.prefill_gave_up(attempt)
            return
        reporter = attempt.node(source)
        peer = attempt.prefill if source is TokenSource.DECODE else attempt.decode
        if chunk.error is not None:
            error = chunk.error.to_exception()
        elif chunk.finish is FinishReason.ABORT:
            error = NodeLost("the node gave the request up")
        else:
            error = InternalError("the node reported an error without saying which")
        avoid = {reporter} if reporter is not None else set()
        if isinstance(error, TransferError | NodeLost) and chunk.finish is FinishReason.ERROR and peer is not None:
            # The reporting node lost its peer. Avoid the prefill node, whichever of the two reported: the
            # decode node can do everything by itself.
            avoid = {attempt.prefill} if attempt.prefill is not None else avoid
        if self._worth_another_try(error):
            self._fail_over(error, avoid)
        else:
            self.fail(error)

    def _worth_another_try(self, error: TandemError) -> bool:
        """An internal error may be the node's fault or the request's. One more node is tried to find out, and
        no third one."""
        if isinstance(error, InternalError) and not self._broke_a_node:
            self._broke_a_node = True
            return True
        return isinstance(error, Unavailable | TransferError) and not isinstance(error, KVLoadFailed)

    def _fail_over(self, error: TandemError, avoid: Iterable[NodeInfo], *, for_now: bool = False) -> None:
        """`for_now`: see `NodeChoice.failed`. No node has failed then, so it does not count as a failover."""
        self._nodes.failed(self.attempt, avoid, for_now=for_now)
        self._abandon_attempt()
        self._last_failure = error
        if len(self.ledger.tokens) >= self.spec.facts.sampling.max_tokens:
            self._end(FinishReason.LENGTH, None)  # all tokens are here; only the report of the end was lost
            return
        if not for_now and self.failovers >= self._placement.config.max_failovers:
            self.fail(error)
            return
        self.failovers += not for_now
        self._metrics.failovers.inc(error.code)
        logger.warning(
            "%s: %s; going on elsewhere after %d tokens (failover %d of %d)",
            self.spec.label, error, len(self.ledger.tokens), self.failovers, self._placement.config.max_failovers,
        )  # fmt: skip
        self.ledger.drop_held()
        if isinstance(error, NodeLost | TransferError):
            self.try_again()
        else:
            self._on_refusal(error)

    def _on_refusal(self, error: TandemError) -> None:
        """The node lives but cannot take the request now. Another node is tried at once. If there is none, a
        request with tokens waits for a pool to change; one without fails with the node's error, which may say
        when to retry."""
        try:
            decision = self._nodes.choose_another()
        except Unavailable:
            if self.ledger.tokens:
                self._wait_for_nodes()
            else:
                self.fail(error)
            return
        self._attempt(decision)

    def try_again(self) -> None:
        """Submits the request unless it runs or has ended. Without a node it waits, and pool changes call
        this again."""
        if self.ended or self.attempt is not None:
            return
        self._paused = False
        try:
            decision = self._nodes.choose()
        except Unavailable:
            self._wait_for_nodes()
            return
        self._attempt(decision)

    def _wait_for_nodes(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._clock()
            self._placement.lives.wait(self)
            self._arm()

    def _attempt(self, decision: RoutingDecision) -> None:
        attempt = Attempt(decision, len(self.ledger.tokens), self._clock(), number=len(self.request_ids) + 1)
        self.attempt = attempt
        self._nodes.went(attempt)
        self.timings.submitted(attempt.submitted_at)
        self.decisions.append(decision)
        self.request_ids.append(attempt.request_id)
        self._waiting_since = None
        self._placement.lives.stop_waiting(self)
        self._arm()
        if self.spec.trace is not None:
            self.spec.trace.considered(self._nodes.alternatives(decision))
        error = self._placement.submit(self, attempt, self.spec, self._hashes, self.ledger.tokens)
        if error is not None and self.attempt is attempt:
            self._fail_over(error, {node for node in attempt.nodes if node not in attempt.sent})

    def _abandon_attempt(self, ended_at: NodeInfo | None = None, *, leaves: bool = False) -> None:
        if (attempt := self.attempt) is not None:
            self.attempt = None
            self._placement.withdraw(self, attempt, ended_at, leaves=leaves)

    # --- deadlines --------------------------------------------------------------------------------------------

    def _next_deadline(self) -> tuple[float, str]:
        """Returns the earliest deadline of the current phase, and its name."""
        deadlines = [(self.spec.deadline, "total")]
        attempt = self.attempt
        if attempt is None and not self._paused:
            since = self._waiting_since or self.timings.started_at
            deadlines.append((since + self._timeouts.failover_wait, "failover_wait"))
        elif attempt is not None:
            # First the nodes are asked what they hold. A request in a node's line is listed, and stays.
            asked = attempt.asked_at if attempt.asked_at is not None else -math.inf
            if asked <= attempt.alive_at:
                deadlines.append((attempt.alive_at + self._timeouts.token_idle / 2, "ask"))
            else:
                deadlines.append((asked + self._timeouts.token_idle / 2, "token_idle"))
            if attempt.found_no_room_at is not None and attempt.alive_at <= attempt.found_no_room_at:
                deadlines.append((attempt.found_no_room_at + _LOOK_AGAIN_S, "room"))
        return min(deadlines)

    def _arm(self) -> None:
        """Sets the one alarm for the earliest deadline. An arriving token does not move the alarm; an alarm
        that rings early is set again."""
        self._alarms.pop(self._on_alarm, None)
        self._alarms = self._placement.alarms.set(self._next_deadline()[0], self._on_alarm)

    def _on_alarm(self) -> None:
        if self.ended:
            return
        deadline, name = self._next_deadline()
        if self._clock() < deadline:
            self._arm()
        elif name == "ask" and self.attempt is not None:
            self._ask(self.attempt)
        elif name == "token_idle" and self.attempt is not None:
            self._on_no_answer(self.attempt)
        elif name == "room" and self.attempt is not None and self.attempt.decode is not None:
            attempt = self.attempt
            self._look_for_room(attempt, self.attempt.decode)
            if self.attempt is attempt:
                self._arm()
        else:
            self._metrics.deadlines.inc(name)
            too_long = DeadlineExceeded(f"the request took longer than router.timeouts.{name} allows")
            self.fail(self._waited_for_none() if name == "failover_wait" else too_long)

    def _waited_for_none(self) -> TandemError:
        if not isinstance(self._last_failure, NodeLost):
            return self._last_failure or Unavailable("no node is ready")
        waited = f"no other node was ready within {self._timeouts.failover_wait:g} s"
        return NodeLost(f"{self._last_failure}, and {waited}")

    def _working(self, attempt: Attempt) -> list[NodeInfo]:
        """The nodes of the attempt that still have something to do for it."""
        if self._handed_over(attempt):
            return [node for node in (attempt.decode,) if node is not None]
        return [node for node in attempt.nodes if node != attempt.prefill or not attempt.prefill_reported]

    def _ask(self, attempt: Attempt) -> None:
        attempt.asked_at = self._clock()
        attempt.unanswered = set(self._working(attempt))
        for node in attempt.unanswered:
            self._placement.ask(node)
        self._arm()

    def _on_no_answer(self, attempt: Attempt) -> None:
        """No answer came to an Ask. A node in the middle of a long step answers after the step, so it is
        asked again. The request leaves a node that is in no step, or in one for longer than
        `heartbeat.wedged`."""
        silent = [
            node
            for node in self._working(attempt)
            if node in attempt.unanswered and not self._placement.is_in_a_step(node)
        ]
        if not silent:
            self._ask(attempt)
            return
        self._metrics.deadlines.inc("token_idle")
        names = ", ".join(node.node_id for node in silent)
        self._fail_over(NodeLost(f"no token for {self._timeouts.token_idle:g} s, and no answer from {names}"), silent)

    # --- the end ----------------------------------------------------------------------------------------------

    def _end(
        self, finish: FinishReason, error: TandemError | None, *, ended_at: NodeInfo | None = None, leaves: bool = False
    ) -> None:
        if self.ended:
            return
        self.ended = True
        self.finish, self.error = finish, error
        self._alarms.pop(self._on_alarm, None)
        last = self.attempt
        self._abandon_attempt(ended_at, leaves=leaves)
        self._placement.lives.stop_waiting(self)
        self._placement.on_ended(last, self.spec, self._hashes, self.ledger.tokens)
        self._note_end(finish)
        if self.spec.trace is not None:
            self.spec.trace.finished(finish.value)
        on_end, on_news = self._on_end, self._on_news
        # The owner refers to this life. Dropping the callbacks breaks that cycle, so that both are freed with
        # the last reference instead of by the garbage collector.
        self._on_end = self._on_news = self.on_read = self.on_begun = _hears_nothing
        on_end(self)
        on_news(self)

    def _note_end(self, finish: FinishReason) -> None:
        tokens = len(self.ledger.tokens)
        self.timings.ended(finish, tokens)
        if self.spec.is_measured:
            decision = self.decisions[-1] if self.decisions else None
            time_of_day = self._placement.time_of_day()
            account = self.timings.account(time_of_day, finish, tokens, decision, self.failovers)
            self._placement.recent.ended(account)
