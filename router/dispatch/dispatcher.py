"""Finds the life that a message belongs to, and does for lives what touches nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict

import msgspec

from tandem.router.config import RouterConfig
from tandem.router.dispatch.admission import Admission
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.generation import Generation
from tandem.router.dispatch.life import RequestLife
from tandem.router.dispatch.spec import SequenceSpec
from tandem.router.links import NodeLinks
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import Decision, Policy, RoutingRequest
from tandem.router.pool import Pool
from tandem.router.prefixes import PrefixRecord, PromptHashes
from tandem.wire.errors import InternalError, NodeLost, TandemError, Unavailable
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import NodeStatus, TokenBatch
from tandem.wire.sampling import FinishReason
from tandem.wire.tracing import Phase

logger = logging.getLogger(__name__)

# Chunks of a request that ended here are still under way for a moment; after that somebody missed the Cancel.
LATE_CHUNK_S = 1.0
REMEMBERED_ENDS = 8192


class Dispatcher:
    """Owns the table of running requests. On the event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        links: NodeLinks,
        pool: Pool,
        policy: Policy,
        metrics: RouterMetrics,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self._links = links
        self._pool = pool
        self._policy = policy
        self._prefixes = PrefixRecord()
        self._clock = time.monotonic  # as everywhere here: the event loop's own clock counts milliseconds
        self._by_request_id: dict[str, RequestLife] = {}
        self._by_node: dict[NodeInfo, set[RequestLife]] = {}
        self._waiting: set[RequestLife] = set()
        self._ends: OrderedDict[str, float] = OrderedDict()  # request ids of attempts that are over
        self._turn = 0
        self._idle: asyncio.Event | None = None  # somebody waits for the end of everything
        self.admission = Admission(
            self._capacity,
            config.limits.queued,
            config.timeouts.queue,
            self._clock,
            metrics,
            self._tell_if_idle,
        )

    def _capacity(self) -> int:
        return len(self._pool.snapshot().decode) * self.config.limits.inflight_per_node

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._by_request_id) + len(self._waiting)

    @property
    def prefill_ids(self) -> frozenset[str]:
        return frozenset(view.node_id for view in self._pool.snapshot().prefill)

    async def generate(self, specs: list[SequenceSpec], tenant: str, *, eager: bool) -> Generation:
        """Wait for a place for all of them, then start them. Raises Overloaded, Unavailable, DeadlineExceeded.

        `eager`: its reader wants tokens as they come, not only the end.
        """
        if not self._pool.snapshot().decode:
            raise Unavailable(self.why_unavailable())
        trace = specs[0].trace
        came = self._clock()
        slots = await self.admission.acquire(tenant, len(specs), min(spec.deadline for spec in specs))
        if trace is not None:
            trace.span(Phase.WAIT, came, came := self._clock())
        generation = Generation(
            lambda spec, news, end: RequestLife(self, spec, news, end), specs, slots, eager=eager
        )
        generation.start()
        if trace is not None:
            trace.span(Phase.ROUTE, came, self._clock())
        return generation

    def why_unavailable(self) -> str:
        reasons = [f"{m.info.node_id}: {why}" for m in self._pool.members if (why := self._pool.unusable(m))]
        return "no decode node is ready" + (f" ({'; '.join(sorted(reasons))})" if reasons else "")

    async def wait_idle(self, deadline: float) -> bool:
        """Whether everything that is running or queued ended before the deadline."""
        self._idle = asyncio.Event()
        self._tell_if_idle()
        try:
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _tell_if_idle(self) -> None:
        if self._idle is not None and self.admission.held == 0 and self.admission.queued == 0:
            self._idle.set()

    def fail_all(self, error: TandemError) -> None:
        self.admission.refuse_all(error)
        for life in [*self._by_request_id.values(), *self._waiting]:
            life.fail(error)

    # --- what lives ask for -----------------------------------------------------------------------------------

    def choose(self, request: RoutingRequest, hashes: PromptHashes) -> Decision:
        snapshot = self._pool.snapshot()
        self._turn += 1
        cached = {
            view.node_id: view.info.block_size
            * self._prefixes.overlap(view.node_id, hashes.of(view.info.block_size))
            for view in (*snapshot.prefill, *snapshot.decode)
        }
        decision = self._policy(snapshot, msgspec.structs.replace(request, cached=cached, turn=self._turn))
        for node in (decision.prefill, decision.decode):
            if node is not None:
                self._prefixes.sent(node.node_id, hashes.of(node.block_size))
        self.metrics.decisions.labels(
            kind="away" if decision.prefill and decision.decode else "one_node"
        ).inc()
        return decision

    def submit(self, life: RequestLife, attempt: Attempt) -> None:
        self._by_request_id[attempt.request_id] = life
        for node in attempt.nodes:
            self._by_node.setdefault(node, set()).add(life)
        if life.spec.trace is not None:
            life.spec.trace.attempt(attempt.request_id, attempt.nodes, attempt.decision.reason)
        remaining = max(0.0, life.spec.deadline - self._clock())
        prompt_tokens = len(life.spec.prompt_token_ids) + attempt.base
        for node, message in attempt.submits(life.spec, life.ledger.tokens, self._links.endpoint, remaining):
            try:
                self._links.submit(node, message)
            except NodeLost as error:
                # Tells every life on that node, this one too, which then moves to another attempt.
                self._pool.suspect(node.node_id, node.epoch, str(error))
                if life.attempt is attempt:
                    life.on_node_lost(node, str(error))
                return
            reads_prompt = node is attempt.prefill or attempt.prefill is None
            self._pool.sent(node.node_id, attempt.request_id, prompt_tokens if reads_prompt else 0)

    def withdraw(self, life: RequestLife, attempt: Attempt, ended_at: NodeInfo | None) -> None:
        """The attempt is over, for whatever reason. Both nodes are told, except one that said so itself
        (`ended_at`); one that is done with it ignores it."""
        if self._by_request_id.pop(attempt.request_id, None) is None:
            return
        self._remember_end(attempt.request_id)
        for node in attempt.nodes:
            lives = self._by_node.get(node)
            if lives is not None:
                lives.discard(life)
                if not lives:
                    del self._by_node[node]
            self._pool.answered(node.node_id, attempt.request_id)
            if node is not ended_at and self._is_member(node):
                self._links.cancel(node, attempt.request_id)

    def _remember_end(self, request_id: str) -> None:
        self._ends[request_id] = self._clock()
        if len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def _is_member(self, node: NodeInfo) -> bool:
        member = self._pool.member(node.node_id)
        return member is not None and member.info == node

    def wait_for_nodes(self, life: RequestLife) -> None:
        self._waiting.add(life)

    def stop_waiting(self, life: RequestLife) -> None:
        self._waiting.discard(life)

    # --- what lives tell --------------------------------------------------------------------------------------

    def on_prefill_reported(self, attempt: Attempt) -> None:
        if attempt.prefill is not None:
            self._pool.answered(attempt.prefill.node_id, attempt.request_id)

    def on_decode_started(self, attempt: Attempt) -> None:
        if attempt.decode is not None:
            self._pool.answered(attempt.decode.node_id, attempt.request_id)
        if attempt.prefill is not None:
            first = attempt.first_token_at
            waited = self._clock() - first if first is not None else 0.0
            self._pool.handover.observe(waited)
            self.metrics.handover_time.observe(waited)

    def on_first_token(self, life: RequestLife, attempt: Attempt) -> None:
        took = self._clock() - attempt.submitted_at
        self.metrics.prefill_time.observe(took)
        if attempt.prefill is not None or attempt.decode is None:
            return
        member = self._pool.member(attempt.decode.node_id)
        if member is not None and member.status is not None and member.status.waiting == 0:
            computed = len(life.spec.prompt_token_ids) + attempt.base - (life.cached_tokens or 0)
            member.meter.on_local_prefill(computed, took)

    def on_ended(self, life: RequestLife, attempt: Attempt | None) -> None:
        finish = life.finish or FinishReason.ERROR
        self.metrics.requests_finished.labels(finished_reason=finish.value).inc()
        self.metrics.prompt_tokens.inc(len(life.spec.prompt_token_ids))
        self.metrics.generation_tokens.inc(len(life.ledger.tokens))
        if life.ended_at is not None and life.first_token_at is not None:
            self.metrics.decode_time.observe(life.ended_at - life.first_token_at)
        if (
            attempt is not None
            and attempt.decode is not None
            and attempt.decode_started
            and life.ledger.tokens
        ):
            # What a chat's next turn begins with is now cached where it was decoded.
            node = attempt.decode
            self._prefixes.sent(node.node_id, life.hashes.with_output(node.block_size, life.ledger.tokens))

    # --- what nodes tell --------------------------------------------------------------------------------------

    def on_tokens(self, batch: TokenBatch) -> None:
        node_id, epoch = batch.node_id, batch.epoch
        self._pool.heard(node_id, epoch)
        lives = self._by_request_id
        for chunk in batch.chunks:
            life = lives.get(chunk.request_id)
            if life is not None:
                try:
                    life.on_chunk(node_id, epoch, chunk)
                except Exception as error:
                    self._on_bug(life, error)
            else:
                self._on_stray(node_id, chunk.request_id, ended=chunk.finish is not None)

    def _on_bug(self, life: RequestLife, error: Exception) -> None:
        """One request's misfortune: it is told, and the others in the same message go on."""
        logger.exception("%s: handling it failed", life.spec.label)
        life.fail(InternalError(f"the router failed to handle it: {type(error).__name__}"))

    def _on_stray(self, node_id: str, request_id: str, *, ended: bool) -> None:
        """A node works on what nobody here wants: it missed the Cancel, perhaps because it was stopped for a while."""
        self.metrics.stray_chunks.inc()
        now = self._clock()
        member = self._pool.member(node_id)
        if ended or member is None or now - self._ends.get(request_id, -LATE_CHUNK_S) < LATE_CHUNK_S:
            return
        self._remember_end(request_id)
        self._links.cancel(member.info, request_id)

    def on_status(self, status: NodeStatus) -> None:
        self._prefixes.set_capacity(status.node_id, status.total_blocks)
        self._pool.on_status(status)

    def on_node_lost(self, node: NodeInfo, why: str) -> None:
        self._prefixes.forget(node.node_id)
        for life in list(self._by_node.get(node, ())):
            try:
                life.on_node_lost(node, why)
            except Exception as error:
                self._on_bug(life, error)
        # What is still queued for it was sent before it was lost; its successor must not find it.
        self._links.forget(node)

    def on_node_left(self, node: NodeInfo) -> None:
        """It is no member any more, lost before or not: nothing of it is kept."""
        self._prefixes.forget(node.node_id)
        self._links.forget(node)

    def on_pool_change(self) -> None:
        for life in list(self._waiting):
            try:
                life.try_again()
            except Exception as error:
                self._on_bug(life, error)
        self.admission.pump()
