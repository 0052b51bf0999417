"""What touches nodes for one request: choosing them, telling them, withdrawing. Keeps the tables of who runs where.

Calls go one way: the dispatcher hears the nodes and calls lives, a life calls its placement. A placement calls neither, but for one
case: when a node's queue is full, the pool says that the node is lost, and the dispatcher tells every life there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tandem.router.choosing import Chooser
from tandem.router.config import RouterConfig
from tandem.router.dispatch.attempt import Attempt, SequenceSpec, submit_of
from tandem.router.links import Links
from tandem.router.metrics import RecentRequests, RouterMetrics, Targets
from tandem.router.policy import RoutingDecision, RoutingRequest
from tandem.router.policy.choose import Alternative
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.router.rates import AnswerLengthMeter
from tandem.router.siblings import SentReports
from tandem.wire.errors import NodeLost, TandemError, Unavailable
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import CacheNews
from tandem.wire.versions import WIRE_VERSION, needed_version

L = TypeVar("L")  # a request's life: here, only the owner of an attempt

# Chunks of a request that ended here are under way for a moment; after that the node has missed the Cancel.
LATE_CHUNK_S = 1.0
REMEMBERED_ENDS = 8192
REMEMBERED_JOBS = 16384


class Placement(Generic[L]):
    """On the event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        links: Links,
        pool: NodePool,
        chooser: Chooser,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        sent_reports: SentReports | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.time_of_day = time.time
        self.recent = RecentRequests(Targets(config.slo_ttft_s, config.slo_inter_token_s), self.time_of_day)
        self.clock = clock
        self._links = links
        self._pool = pool
        self._chooser = chooser
        self._sent_reports = sent_reports
        self._answers = AnswerLengthMeter()
        self._by_request_id: dict[str, L] = {}
        self._by_node: dict[NodeInfo, set[L]] = {}
        self._waiting: dict[L, None] = {}  # for a node to appear
        self._homes: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()  # of jobs, and until when
        self._ends: OrderedDict[str, float] = OrderedDict()  # request ids of attempts that are over

    # --- who is where

    @property
    def running(self) -> int:
        return len(self._by_request_id) + len(self._waiting)

    @property
    def waiting(self) -> list[L]:
        """Those that have no node, in the order in which they lost theirs."""
        return list(self._waiting)

    def life_of(self, request_id: str) -> L | None:
        return self._by_request_id.get(request_id)

    def lives(self) -> list[L]:
        return [*self._by_request_id.values(), *self._waiting]

    def lives_on(self, node: NodeInfo) -> list[L]:
        return list(self._by_node.get(node, ()))

    def wait_for_nodes(self, life: L) -> None:
        self._waiting[life] = None

    def stop_waiting(self, life: L) -> None:
        self._waiting.pop(life, None)

    @property
    def prefill_ids(self) -> frozenset[str]:
        return self._pool.prefill_ids

    # --- an attempt, from its choice to its end

    def choose(self, request: RoutingRequest, hashes: PromptHashes) -> RoutingDecision:
        """Raises Unavailable when no node can take it."""
        decision = self._chooser.choose(request, hashes)
        self.metrics.decisions.inc("away" if decision.prefill and decision.decode else "one_node")
        return decision

    def version_for(self, spec: SequenceSpec) -> int:
        """Of Tandem's messages: nodes of one before could not read this request."""
        return 0 if self._pool.oldest_version >= WIRE_VERSION else needed_version(submit_of(spec))

    def alternatives(
        self, request: RoutingRequest, hashes: PromptHashes, decision: RoutingDecision
    ) -> list[Alternative]:
        """For a traced request, just after it was decided."""
        return self._chooser.alternatives(request, hashes, decision)

    def submit(
        self, life: L, attempt: Attempt, spec: SequenceSpec, hashes: PromptHashes, tokens: list[int]
    ) -> TandemError | None:
        """Returns why it could not, when a node does not read, or could not read this."""
        self._by_request_id[attempt.request_id] = life
        for node in attempt.nodes:
            self._by_node.setdefault(node, set()).add(life)
        if spec.trace is not None:
            spec.trace.attempt(attempt.request_id, attempt.nodes, attempt.decision.reason)
        remaining = max(0.0, spec.deadline - self.clock())
        prompt_tokens = len(spec.prompt_token_ids) + attempt.base
        encoders: list[NodeInfo] = []
        if spec.images:
            digests = [""] * len(spec.images)
            for part in spec.media:
                digests[part.image] = part.identifier.rpartition("/")[0]
            encoders = self._pool.encoders_for(attempt.nodes[0].content, digests)
        for node, message in attempt.submits(spec, tokens, self._links.endpoint, remaining, encoders):
            try:
                attempt.sent[node] = self._links.submit(node, message)
            except NodeLost as error:
                # Tells every life on that node, this one too, which then moves to another attempt.
                self._pool.suspect(node.node_id, node.epoch, str(error))
                return error
            except Unavailable as error:
                return error
            reads_prompt = node is attempt.prefill or attempt.prefill is None
            taken = self.expected_tokens(spec) if node is attempt.decode else prompt_tokens
            load = prompt_tokens if reads_prompt else 0, node.blocks_for(taken)
            self._pool.sent(node.node_id, attempt.request_id, *load)
            if self._sent_reports is not None:
                self._sent_reports.tell(node, attempt.request_id, *load, hashes)
        return None

    def withdraw(self, life: L, attempt: Attempt, ended_at: NodeInfo | None, *, leaves: bool = False) -> None:
        """The attempt is over. Both nodes are told, except one that said so itself (`ended_at`); a node that is done with it
        ignores it. `leaves`: they go on, and none is told."""
        if self._by_request_id.pop(attempt.request_id, None) is None:
            return
        self.remember_end(attempt.request_id)
        for node in attempt.nodes:
            lives = self._by_node.get(node)
            if lives is not None:
                lives.discard(life)
                if not lives:
                    del self._by_node[node]
            self._answered(node.node_id, attempt.request_id)
            if node is not ended_at and not leaves:
                self.cancel(node, attempt.request_id)

    def cancel(self, node: NodeInfo, request_id: str) -> None:
        member = self._pool.member(node.node_id)
        if member is not None and member.info == node:
            self._links.cancel(node, request_id)

    def remember_end(self, request_id: str) -> None:
        self._ends[request_id] = self.clock()
        if len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def ended_just_now(self, request_id: str) -> bool:
        return self.clock() - self._ends.get(request_id, -LATE_CHUNK_S) < LATE_CHUNK_S

    # --- what is known of the nodes' work

    def expected_tokens(self, spec: SequenceSpec) -> int:
        """How many tokens' blocks a sequence may take on its decode node, or where its vector is made."""
        if spec.pooling is not None:
            return len(spec.prompt_token_ids)
        return len(spec.prompt_token_ids) + self._answers.expected(spec.sampling.max_tokens)

    def has_heard(self, node: NodeInfo, attempt: Attempt) -> bool:
        """Whether the node has acknowledged the attempt's Submit."""
        sent = attempt.sent.get(node)
        return sent is not None and self._links.has_heard(node, sent)

    def ask(self, node: NodeInfo) -> None:
        """The node answers with what it holds, between two steps."""
        self._links.ask(node)

    def is_in_a_step(self, node: NodeInfo) -> bool:
        """Whether the node, by its last status, is in a step that may well be a long one."""
        member = self._pool.member(node.node_id)
        status = member.status if member is not None and member.info == node else None
        return status is not None and 0 < status.step_age_s < self.config.heartbeat.wedged

    # --- what a life tells of its course

    def _answered(self, node_id: str, request_id: str) -> None:
        if self._pool.answered(node_id, request_id) and self._sent_reports is not None:
            self._sent_reports.tell_answered(node_id, request_id)

    def on_prefill_reported(self, attempt: Attempt) -> None:
        if attempt.prefill is not None:
            self._answered(attempt.prefill.node_id, attempt.request_id)

    def on_decode_started(self, attempt: Attempt) -> float:
        """The prefill node has reported too, unless the decode node read the prompt itself: then it need not go on. Returns how
        long the handover took."""
        if attempt.decode is not None:
            self._answered(attempt.decode.node_id, attempt.request_id)
        if attempt.prefill is None:
            return 0.0
        if attempt.first_token_at is None:
            self.cancel(attempt.prefill, attempt.request_id)
            return 0.0
        waited = self.clock() - attempt.first_token_at
        self._pool.handover.observe(waited)
        self.metrics.handover_time.observe(waited)
        return waited

    def on_first_token(self, attempt: Attempt, computed: int, queue_s: float) -> None:
        """`computed`: how many tokens were read for it, those in a prefix cache left out. `queue_s`: in the node's line."""
        took = self.clock() - attempt.submitted_at
        self.metrics.prefill_time.observe(max(took - queue_s, 0.0))
        if attempt.prefill is not None or attempt.decode is None:
            return
        member = self._pool.member(attempt.decode.node_id)
        if member is not None and member.status is not None and member.status.waiting == 0:
            member.meter.on_local_prefill(computed, took)

    def on_ended(
        self, attempt: Attempt | None, spec: SequenceSpec, hashes: PromptHashes, output: Sequence[int]
    ) -> None:
        if output and not spec.reads_ahead:
            self._answers.ended(len(output))
        if attempt is not None and attempt.decode is not None and attempt.decode_started and output:
            self._chooser.answered(attempt.decode, hashes, output)
            if spec.job_id is not None:
                self._remember_home(spec.job_id, attempt, is_last_step=spec.is_last_step)

    def _remember_home(self, job_id: str, attempt: Attempt, *, is_last_step: bool) -> None:
        self._homes.pop(job_id, None)
        pinning = {node.node_id: node.pin_seconds for node in attempt.nodes if node.pin_seconds}
        if pinning and not is_last_step:
            self._homes[job_id] = frozenset(pinning), self.clock() + max(pinning.values())
            if len(self._homes) > REMEMBERED_JOBS:
                self._homes.popitem(last=False)

    def home_of(self, job_id: str | None) -> frozenset[str]:
        """The nodes where the job's last turn is pinned, if it ended here just now."""
        nodes, until = (
            self._homes.get(job_id, (frozenset(), 0.0)) if job_id is not None else (frozenset(), 0.0)
        )
        return nodes if self.clock() < until else frozenset()

    def turn_ended(
        self, decision: RoutingDecision, request_id: str, job_id: str, called: list[str] | None
    ) -> None:
        """The nodes that pinned the turn hear which tools its answer called."""
        for node in (decision.prefill, decision.decode):
            if node is not None and node.pin_seconds:
                member = self._pool.member(node.node_id)
                if member is not None and member.info == node:
                    self._links.turn_ended(node, request_id, job_id, called)

    # --- what the dispatcher hears of the pool

    def on_cache_news(self, news: CacheNews) -> bool:
        return self._chooser.on_cache_news(news)

    def forget_prompts(self, node_id: str) -> None:
        self._chooser.forget_prompts(node_id)

    def forget_prefixes(self, node: NodeInfo) -> None:
        self._chooser.forget(node.node_id)
