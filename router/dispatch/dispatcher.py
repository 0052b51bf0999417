"""Starts the lives of an HTTP request, and passes each message of a node to the life that it belongs to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import InternalError, TandemError, Unavailable
from tandem.router.config import RouterConfig
from tandem.router.dispatch.admission import Admission
from tandem.router.dispatch.generation import Generation
from tandem.router.dispatch.life import RequestLife
from tandem.router.dispatch.lives import FollowedAnswers
from tandem.router.dispatch.placement import Placement
from tandem.router.dispatch.slots import AskedPlaces, Slots
from tandem.router.links import Links
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.router.recent import RecentRequests
from tandem.router.siblings import SentReports
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import CacheNews, Holding, NodeStatus, TokenBatch
from tandem.wire.tracing import TracePhase

logger = logging.getLogger(__name__)

# Hashing a longer prompt takes more than a tenth of a millisecond, so a thread does it.
HASHED_INLINE_TOKENS = 4096

_Prompt = tuple[int, str | None, str | None]


def _prompt_of(spec: SequenceSpec) -> _Prompt:
    """Identifies a prompt. The choices of one request share one token list, so its id is enough."""
    return id(spec.facts.prompt_token_ids), spec.facts.cache_salt, spec.facts.lora


class Dispatcher:
    """Runs on the event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        links: Links,
        pool: NodePool,
        chooser: Chooser,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        """`clock` is not the event loop's own clock, whose resolution may be a millisecond. All of dispatch
        uses it. `weight_of`: a tenant's, by its name."""
        self.config = config
        self.metrics = metrics
        self._links = links
        self._pool = pool
        self.placement: Placement[RequestLife] = Placement(config, links, pool, chooser, metrics, clock)
        self._clock = clock
        self._weight_of = weight_of
        self.followed = FollowedAnswers()
        # Hear of the first token of each request for an answer.
        self.on_begun: set[Callable[[RequestLife], None]] = set()
        # Hear of each request for an answer when it has ended.
        self.on_answered: set[Callable[[list[RequestLife]], None]] = set()
        # Set when the last request has ended. None until `wait_idle` is called.
        self._idle: asyncio.Event | None = None
        self.admission = self._admission(lambda: pool.view.decode_count, pool.view.has_room)
        # Vectors wait for other nodes than answers do, so they have a line of their own, and neither line
        # delays the other.
        self.vectors = self._admission(lambda: len(pool.view.snapshot().prompt_readers), pool.view.has_room_for_vector)

    def _admission(self, nodes: Callable[[], int], has_room: Callable[[int, int], bool]) -> Admission:
        config, pool = self.config, self._pool
        return Admission(
            lambda: 0 if pool.is_paused else nodes() * config.limits.inflight_per_node,
            config.limits.queued,
            config.timeouts.queue,
            self._clock,
            self.metrics,
            self._tell_if_idle,
            has_room,
            lambda: pool.is_paused,
            by_priority=config.by_priority,
            admit_within_s=config.admit_within,
            readers=pool.view,
            weight_of=self._weight_of,
        )

    def report_to_siblings(self, reports: SentReports | None) -> None:
        """Reports every Submit and its answer to the sibling processes. None when no other process shares the
        port."""
        self.placement.sent_reports = reports

    @property
    def queued(self) -> int:
        """The number of sequences in line, for an answer or a vector."""
        return self.admission.queued + self.vectors.queued

    @property
    def held(self) -> int:
        return self.admission.held + self.vectors.held

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self.placement.lives)

    @property
    def recent(self) -> RecentRequests:
        return self.placement.recent

    def moving(self) -> list[tuple[str, str, float, int]]:
        """Lists the transfers under way: prefill node, decode node, seconds since submission, prompt
        tokens."""
        now = self._clock()
        return [
            (
                attempt.prefill.node_id,
                attempt.decode.node_id,
                now - attempt.submitted_at,
                len(life.spec.facts.prompt_token_ids),
            )
            for life in self.placement.lives.all()
            if (attempt := life.attempt) is not None
            and attempt.prefill is not None
            and attempt.decode is not None
            and not attempt.decode_started
        ]

    async def generate(self, specs: list[SequenceSpec], tenant: str, *, eager: bool) -> Generation:
        """Waits for the first place, then starts the sequences; the later ones start as their places come.
        All specs belong to one HTTP request and share its deadline and priority. Raises Overloaded,
        Unavailable or DeadlineExceeded.

        `eager`: the reader wants tokens as they come, not only the end.
        """
        makes_vectors = specs[0].facts.pooling is not None
        if makes_vectors and not self._pool.view.snapshot().prompt_readers:
            raise Unavailable(self.why_unavailable("prefill or aggregated"))
        if not makes_vectors and not self._pool.view.decode_count:
            raise Unavailable(self.why_unavailable())
        trace = specs[0].trace
        came = self._clock()
        hashes = await self._hashed(specs)
        slots = await self._places_for(specs, tenant)
        if trace is not None:
            trace.span(TracePhase.WAIT, came, self._clock())
        placed = self._clock()
        generation = Generation(
            lambda spec, news, end: RequestLife(self.placement, spec, hashes[_prompt_of(spec)], news, end, came),
            specs,
            slots,
            self._note_generation,
            eager=eager,
            clock=self._clock,
        )
        if self.on_begun:
            generation.lives[0].on_begun = self._note_begun
        generation.start()
        if trace is not None:
            trace.span(TracePhase.ROUTE, placed, self._clock())
        return generation

    async def _places_for(self, specs: list[SequenceSpec], tenant: str) -> Slots:
        first, facts = specs[0], specs[0].facts
        line = self.admission if facts.pooling is None else self.vectors
        asked = AskedPlaces(
            len(specs),
            max(map(self.placement.expected_tokens, specs)),
            sum([len(spec.facts.prompt_token_ids) for spec in specs]) / len(specs),
            facts.priority,
            first.keep is not None,
            first.first_by,
        )
        if facts.when_idle:
            return line.acquire_idle(asked)
        return await line.acquire(tenant, asked, first.deadline)

    def idle_room(self) -> int:
        """How many further sequences could run because nothing else needs their places."""
        return max(self.admission.idle_room, self.vectors.idle_room)

    def _note_begun(self, life: RequestLife) -> None:
        for hear in self.on_begun:
            hear(life)

    def _note_generation(self, lives: list[RequestLife]) -> None:
        if not lives[0].spec.is_measured:
            return
        self.metrics.request_choices.observe(len(lives))
        if lives[0].spec.facts.pooling is not None:
            return
        self.metrics.request_longest_answer.observe(max(len(life.ledger.tokens) for life in lives))
        for hear in self.on_answered:
            hear(lives)

    async def _hashed(self, specs: list[SequenceSpec]) -> dict[_Prompt, PromptHashes]:
        """Hashes each prompt once for all of its choices. A long prompt is hashed in a thread, so that other
        streams go on."""
        hashes: dict[_Prompt, PromptHashes] = {}
        for spec in specs:
            prompt = _prompt_of(spec)
            if prompt not in hashes:
                made = PromptHashes(
                    spec.facts.prompt_token_ids, spec.facts.cache_salt, spec.facts.lora, spec.facts.media
                )
                hashes[prompt] = made
                if len(spec.facts.prompt_token_ids) > HASHED_INLINE_TOKENS:
                    for size in self._pool.block_sizes:
                        await asyncio.to_thread(made.of, size)
        return hashes

    def why_unavailable(self, role: str = "decode") -> str:
        reasons = [f"{m.info.node_id}: {why}" for m in self._pool.members if (why := self._pool.unusable(m))]
        return f"no {role} node is ready" + (f" ({'; '.join(sorted(reasons))})" if reasons else "")

    async def wait_idle(self, deadline: float) -> bool:
        """Waits until nothing runs or is queued. Returns False when the deadline (on the event loop's clock)
        came first."""
        self._idle = asyncio.Event()
        self._tell_if_idle()
        try:
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _tell_if_idle(self) -> None:
        if self._idle is not None and self.held == 0 and self.queued == 0:
            self._idle.set()

    def forget_prompts(self, node_id: str) -> None:
        self.placement.forget_prompts(node_id)

    def fail_all(self, error: TandemError) -> None:
        """Ends all requests because this router ends. Nodes go on with background answers, and other routers
        find them."""
        self.admission.refuse_all(error)
        self.vectors.refuse_all(error)
        for life in self.placement.lives.all():
            life.leave(error)
        self.followed.leave_all(error)

    # --- what nodes tell --------------------------------------------------------------------------------------

    def on_tokens(self, batch: TokenBatch) -> None:
        node_id, epoch = batch.node_id, batch.epoch
        self._pool.heard(node_id, epoch)
        life_of = self.placement.lives.of
        for chunk in batch.chunks:
            life = life_of(chunk.request_id)
            if life is not None:
                try:
                    life.on_chunk(node_id, epoch, chunk)
                except Exception as error:
                    self._on_bug(life, error)
            elif not self.followed.on_chunk(node_id, epoch, chunk):
                self._on_stray(node_id, chunk.request_id, ended=chunk.finish is not None)

    def _on_bug(self, life: RequestLife, error: Exception) -> None:
        """Fails this one request, so that the other requests of the same message go on."""
        logger.exception("%s: handling it failed", life.spec.label)
        life.fail(InternalError(f"the router failed to handle it: {type(error).__name__}"))

    def _on_stray(self, node_id: str, request_id: str, *, ended: bool) -> None:
        """The node works on a request that this router does not have. It missed the Cancel, perhaps because
        it was stopped for a while, so the Cancel is sent again, at most once a second."""
        self.metrics.stray_chunks.inc()
        member = self._pool.member(node_id)
        if ended or member is None or self.placement.lives.ended_just_now(request_id):
            return
        self.placement.lives.remember_end(request_id)
        self.placement.cancel(member.info, request_id)

    def on_status(self, status: NodeStatus) -> None:
        self._pool.on_status(status)

    def on_cache_news(self, news: CacheNews) -> None:
        if not self._pool.heard(news.node_id, news.epoch) or self.placement.on_cache_news(news):
            return
        member = self._pool.member(news.node_id)
        if member is not None:
            self._links.list_cache(member.info)

    def on_holding(self, holding: Holding) -> None:
        """The node lists the requests that it holds, as the answer to an Ask or after a gap in its messages.
        Requests that only the node has are cancelled there; lives that the node lacks, or whose tokens were
        lost, go on elsewhere."""
        if not self._pool.heard(holding.node_id, holding.epoch):
            return
        member = self._pool.member(holding.node_id)
        if member is None:
            return
        node = member.info
        for request_id in holding.requests:
            life = self.placement.lives.of(request_id)
            if life is None or life.attempt is None or node not in life.attempt.nodes:
                self.placement.cancel(node, request_id)
        self._tell(self.placement.lives.on(node), lambda life: life.on_holding(node, holding))
        self.followed.on_line_broken(node)

    def _tell(self, lives: list[RequestLife], what: Callable[[RequestLife], None]) -> None:
        for life in lives:
            try:
                what(life)
            except Exception as error:
                self._on_bug(life, error)

    def check_nodes(self) -> None:
        """Marks silent nodes as lost, and moves requests whose Submit a node has not received. Must be called
        several times within `heartbeat.silence`."""
        if not self._pool.check_silence():
            return
        for member in self._pool.members:
            is_deaf = member.lost is None and self._links.deaf_for(member.info) > self.config.heartbeat.silence
            self._pool.note_deaf(member, is_deaf)
            if is_deaf:
                node = member.info
                self._tell(self.placement.lives.on(node), lambda life, node=node: life.on_unheard(node))  # type: ignore[misc]

    def on_node_lost(self, node: NodeInfo, why: str) -> None:
        self.placement.forget_prefixes(node)
        self._tell(self.placement.lives.on(node), lambda life: life.on_node_lost(node, why))
        self.followed.on_node_lost(node, why)
        # Messages that are still queued for the node are older than its loss. A successor at this endpoint
        # must not get them.
        self._links.begin_anew(node)

    def on_node_left(self, node: NodeInfo) -> None:
        """The node is no longer a member, whether it was lost before or not. The router drops all that it
        knows of it."""
        self.placement.forget_prefixes(node)
        self.followed.on_node_lost(node, "it left")
        self._links.forget(node)

    def on_node_joined(self, node: NodeInfo) -> None:
        self._links.meet(node)
        self._links.ping(node)

    def on_pool_change(self) -> None:
        if waiting := self.placement.lives.waiting:
            self._tell(waiting, RequestLife.try_again)
        self.admission.on_pool_change()
        self.vectors.on_pool_change()
