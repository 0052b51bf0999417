"""A request's attempts: the checked request (`SequenceSpec`), and each attempt on one pair of nodes, or on
one node, under its own request id and transfer id. `Placement` chooses nodes, sends and withdraws.

Calls go one way: the dispatcher hears the nodes and calls lives, and a life calls its placement. One
exception: when a node's send queue is full, the placement tells the pool that it is lost, and the dispatcher
tells every life there.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

import msgspec

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import NodeLost, TandemError, Unavailable
from tandem.router.config import RouterConfig
from tandem.router.dispatch.lives import JobHomes, L, Lives
from tandem.router.links import Links
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.choose import Alternative, Chooser
from tandem.router.policy.views import AnswerLengthMeter, RoutingDecision, RoutingRequest, blocks_for
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.router.recent import RecentRequests, Targets
from tandem.router.siblings import SentReports
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeInfo, PeerAddress
from tandem.wire.requests import CacheNews, CachePeers, KeepAnswer, KVTransferParams, Submit, TransferRole, new_id
from tandem.wire.versions import WIRE_VERSION, needed_version


class TokenSource(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


# Looked up once instead of with every token.
_PREFILL, _DECODE = TokenSource


class Attempt:
    """One try, under a new request id, so that an abandoned one's late messages are never taken for it."""

    def __init__(self, decision: RoutingDecision, base: int, submitted_at: float, number: int = 1) -> None:
        self.decision = decision
        self.prefill, self.decode = decision.prefill, decision.decode
        self.nodes = [node for node in (self.prefill, self.decode) if node is not None]
        self.number = number  # its number among the request's attempts
        self.request_id = f"req-{new_id()}"
        self.base = base  # output tokens that were known when it began
        self.submitted_at = submitted_at
        self.sent: dict[NodeInfo, Position] = {}  # positions of its Submits on the lines to its nodes
        self.alive_at = submitted_at  # when a token, or its nodes' answer to an Ask, last came
        self.prefill_reported = False  # the prefill node's first token has come, or it will send none
        self.prefill_gave_up = False  # it will send none: the decode node computes the prompt itself
        self.decode_cached: int | None = None  # prompt tokens that the decode node had in its own cache
        self.decode_started = False  # the decode node has reported: it has the KV, or computed it
        self.first_token_at: float | None = None
        self.asked_at: float | None = None  # when its nodes were last asked whether they have it
        self.unanswered: set[NodeInfo] = set()  # nodes that were asked and have not answered
        self.prompt_tokens = 0  # that its nodes read, output that it brought included
        self.found_no_room_at: float | None = None  # when it last found no other decode node with room

    def node(self, source: TokenSource) -> NodeInfo | None:
        return self.decode if source is TokenSource.DECODE else self.prefill

    def source(self, node_id: str, epoch: int) -> TokenSource | None:
        """Which of its nodes this incarnation is; None when it is neither."""
        decode, prefill = self.decode, self.prefill
        if decode is not None and decode.node_id == node_id and decode.epoch == epoch:
            return _DECODE
        if prefill is not None and prefill.node_id == node_id and prefill.epoch == epoch:
            return _PREFILL
        return None

    def submits(
        self, spec: SequenceSpec, tokens: list[int], reply_to: str, timeout_s: float, encoders: Sequence[NodeInfo] = ()
    ) -> list[tuple[NodeInfo, Submit]]:
        """Makes the Submits, the decode node's first, so that it reserves and registers blocks early.
        `encoders`: one encoder node for each image, told to the node that computes the prompt."""
        prefill, decode = self.prefill, self.decode
        source, mirror = _tier(self.decision.source), _tier(self.decision.mirror)
        cache_peers = CachePeers(source, mirror) if source or mirror else None

        addresses = [PeerAddress(node.node_id, node.epoch, node.peer_endpoint) for node in encoders]

        def submit(transfer: KVTransferParams | None) -> Submit:
            keep = None
            if spec.keep is not None:
                # A pair's prefill node needs no note: it only has to go on without this router.
                is_sent_away = transfer is not None and transfer.role is TransferRole.PRODUCE
                note = b"" if is_sent_away else spec.keep.note
                keep = KeepAnswer(spec.keep.answer_id, self.number, note)
            reads_prompt = transfer is None or transfer.role is TransferRole.PRODUCE
            return submit_of(
                spec,
                self.request_id,
                reply_to,
                timeout_s,
                tokens,
                transfer,
                keep,
                cache_peers,
                addresses if reads_prompt else (),
            )

        if prefill is None or decode is None:
            return [(node, submit(None)) for node in self.nodes]

        transfer_id = f"kv-{new_id()}"

        def transfer(role: TransferRole, peer: NodeInfo) -> KVTransferParams:
            return KVTransferParams(transfer_id, role, PeerAddress(peer.node_id, peer.epoch, peer.peer_endpoint))

        return [
            (decode, submit(transfer(TransferRole.CONSUME, prefill))),
            (prefill, submit(transfer(TransferRole.PRODUCE, decode))),
        ]


def submit_of(
    spec: SequenceSpec,
    request_id: str = "",
    reply_to: str = "",
    timeout_s: float = 0.0,
    tokens: Sequence[int] = (),
    transfer: KVTransferParams | None = None,
    keep: KeepAnswer | None = None,
    cache_peers: CachePeers | None = None,
    encoders: Sequence[PeerAddress] = (),
) -> Submit:
    """Makes a Submit. With only `spec`, it holds what is the same for every attempt and node."""
    return Submit(
        request_id=request_id,
        reply_to=reply_to,
        timeout_s=timeout_s,
        output_token_ids=list(tokens),
        transfer=transfer,
        trace=spec.trace is not None,
        keep=keep,
        cache_peers=cache_peers,
        encoders=list(encoders),
        **msgspec.structs.asdict(spec.facts),
    )


def _tier(node: NodeInfo | None) -> PeerAddress | None:
    return None if node is None else PeerAddress(node.node_id, node.epoch, node.tier_endpoint)


# How much later than its time an alarm may ring.
TICK_S = 0.02

Ring = Callable[[], None]


class Alarms:
    """The deadlines of all requests. One timer of the event loop serves all alarms of a tick, because nearly
    every request ends before its alarm rings, and a timer for each would cost several times as much."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[int, dict[Ring, None]] = {}  # by tick; they ring in the order in which they were set

    def set(self, when: float, ring: Ring) -> dict[Ring, None]:
        """Sets `ring` to be called at the end of `when`'s tick. Returns that tick's alarms; the caller cancels
        its alarm by removing it from them."""
        tick = int(when / TICK_S) + 1
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = {}
            # Not at a time of the loop's own clock: an alarm that rings early would be set again at once, and again.
            asyncio.get_running_loop().call_later(tick * TICK_S - self._clock(), self._ring, tick)
        due[ring] = None
        return due

    def _ring(self, tick: int) -> None:
        loop = asyncio.get_running_loop()
        for ring in self._due.pop(tick):
            # In a call of its own, so that an exception in one does not stop the others.
            loop.call_soon(ring)


class Placement(Generic[L]):
    """Chooses nodes and sends to them. Runs on the event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        links: Links,
        pool: NodePool,
        chooser: Chooser,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.time_of_day = time.time
        self.recent = RecentRequests(Targets(config.slo_ttft_s, config.slo_inter_token_s), self.time_of_day)
        self.clock = clock
        self._links = links
        self._pool = pool
        self.chooser = chooser
        self.sent_reports: SentReports | None = None  # None when no other process shares the port
        self.alarms = Alarms(clock)
        self._answers = AnswerLengthMeter()
        self.lives: Lives[L] = Lives(clock)
        self.homes = JobHomes(clock)

    @property
    def prefill_ids(self) -> frozenset[str]:
        return self._pool.view.prefill_ids

    def not_started_again(self, nodes: Iterable[NodeInfo]) -> frozenset[str]:
        """The names of those whose incarnation is still the pool's."""
        members = ((node, self._pool.member(node.node_id)) for node in nodes)
        return frozenset(node.node_id for node, member in members if member and member.info.epoch == node.epoch)

    # --- an attempt, from its choice to its end

    def choose(self, request: RoutingRequest, hashes: PromptHashes) -> RoutingDecision:
        """Raises Unavailable when no node can take it."""
        decision = self.chooser.choose(request, hashes)
        self.metrics.decisions.inc("away" if decision.prefill and decision.decode else "one_node")
        return decision

    def has_room(self, request: RoutingRequest, hashes: PromptHashes) -> bool:
        """Whether the node that would be chosen to write the answer has the blocks for the request."""
        try:
            decision = self.chooser.choose(request, hashes)
        except Unavailable:
            return False
        writes = decision.decode or decision.prefill  # which gives the last token alone
        member = self._pool.member(writes.node_id) if writes is not None else None
        return member is not None and member.has_room(request.prompt_tokens + request.max_new_tokens)

    def version_for(self, spec: SequenceSpec) -> int:
        """The version of Tandem's messages that this request needs; 0 when all nodes speak the newest one."""
        return 0 if self._pool.oldest_version >= WIRE_VERSION else needed_version(submit_of(spec))

    def alternatives(
        self, request: RoutingRequest, hashes: PromptHashes, decision: RoutingDecision
    ) -> list[Alternative]:
        """For a traced request, just after its decision: the best nodes that were not chosen, too."""
        return self.chooser.alternatives(request, hashes, decision)

    def submit(
        self, life: L, attempt: Attempt, spec: SequenceSpec, hashes: PromptHashes, tokens: list[int]
    ) -> TandemError | None:
        """Sends the attempt to its nodes. Returns the error when a node does not or cannot read this."""
        self.lives.begin(life, attempt.request_id, attempt.nodes)
        if spec.trace is not None:
            spec.trace.attempt(attempt.request_id, attempt.nodes, attempt.decision.reason)
        remaining = max(0.0, spec.deadline - self.clock())
        attempt.prompt_tokens = prompt_tokens = len(spec.facts.prompt_token_ids) + attempt.base
        encoders: list[NodeInfo] = []
        if spec.facts.images:
            digests = [""] * len(spec.facts.images)
            for part in spec.facts.media:
                digests[part.image] = part.identifier.rpartition("/")[0]
            encoders = self._pool.view.encoders_for(attempt.nodes[0].content, digests)
        for node, message in attempt.submits(spec, tokens, self._links.endpoint, remaining, encoders):
            try:
                attempt.sent[node] = self._links.submit(node, message)
            except NodeLost as error:
                # The pool tells every life on that node, this one too, which then begins another attempt.
                self._pool.suspect(node.node_id, node.epoch, str(error))
                return error
            except Unavailable as error:
                return error
            if spec.facts.when_idle:
                continue  # it delays no other request
            reads_prompt = node is attempt.prefill or attempt.prefill is None
            taken = self.expected_tokens(spec) if node is attempt.decode else prompt_tokens
            load = prompt_tokens if reads_prompt else 0, blocks_for(taken, node)
            self._pool.sent(node.node_id, attempt.request_id, *load)
            if self.sent_reports is not None:
                self.sent_reports.tell(node, attempt.request_id, *load, hashes)
        return None

    def withdraw(self, life: L, attempt: Attempt, ended_at: NodeInfo | None, *, leaves: bool = False) -> None:
        """Ends the attempt, and sends a Cancel to each node but `ended_at`, which reported the end; a node
        that has finished the request ignores it. `leaves`: the nodes go on, and get no Cancel."""
        if not self.lives.end(life, attempt.request_id, attempt.nodes):
            return
        for node in attempt.nodes:
            self._answered(node.node_id, attempt.request_id)
            if node is not ended_at and not leaves:
                self.cancel(node, attempt.request_id)

    def cancel(self, node: NodeInfo, request_id: str) -> None:
        member = self._pool.member(node.node_id)
        if member is not None and member.info == node:
            self._links.cancel(node, request_id)

    # --- what is known of the nodes' work

    def expected_tokens(self, spec: SequenceSpec) -> int:
        """How many tokens a sequence is expected to have on its decode node, or where its vector is made."""
        if spec.facts.pooling is not None:
            return len(spec.facts.prompt_token_ids)
        return len(spec.facts.prompt_token_ids) + self._answers.expected(spec.facts.sampling.max_tokens)

    def crowded(self) -> frozenset[str]:
        """The nodes on which this router has more requests than on another one of the same pool. What runs when nothing
        else does is spread by this, because no status tells how much of it a node has."""
        names: set[str] = set()
        snapshot = self._pool.view.snapshot()
        for views in (snapshot.prefill, snapshot.decode):
            counts = {view.node_id: self.lives.num_on(view.info) for view in views}
            least = min(counts.values(), default=0)
            names |= {name for name, count in counts.items() if count > least}
        return frozenset(names)

    def has_heard(self, node: NodeInfo, attempt: Attempt) -> bool:
        """Whether the node has acknowledged the attempt's Submit."""
        sent = attempt.sent.get(node)
        return sent is not None and self._links.has_heard(node, sent)

    def ask(self, node: NodeInfo) -> None:
        """Asks the node what it holds. It answers between two steps."""
        self._links.ask(node)

    def is_in_a_step(self, node: NodeInfo) -> bool:
        """Whether the node's last status shows it in a step that has not yet lasted `heartbeat.wedged`."""
        member = self._pool.member(node.node_id)
        status = member.reported if member is not None and member.info == node else None
        return status is not None and 0 < status.step_age_s < self.config.heartbeat.wedged

    def waits_for_silent_peers(self, node: NodeInfo) -> bool:
        """Whether no other request runs on the node, whose end would free blocks, and it keeps blocks to which a peer may
        still write. That may last until the peer goes on. A request that is there alone begins again and again."""
        member = self._pool.member(node.node_id)
        status = member.reported if member is not None and member.info == node else None
        if status is None or status.loading or not status.quarantined_blocks + status.held_blocks:
            return False
        return status.running == 0 < status.waiting or status.running + status.waiting == 1

    # --- what a life tells of its course

    def _answered(self, node_id: str, request_id: str) -> None:
        if self._pool.answered(node_id, request_id) and self.sent_reports is not None:
            self.sent_reports.tell_answered(node_id, request_id)

    def on_prefill_reported(self, attempt: Attempt) -> None:
        if attempt.prefill is not None:
            self._answered(attempt.prefill.node_id, attempt.request_id)

    def on_decode_started(self, attempt: Attempt) -> float:
        """Notes the decode node's first report. Returns how long the handover took, or 0 if there was none to
        measure. The prefill node gets a Cancel if its first token has not come by now, because it is no
        longer needed."""
        if attempt.decode is not None:
            self._answered(attempt.decode.node_id, attempt.request_id)
        if attempt.prefill is None:
            return 0.0
        if attempt.first_token_at is None:
            self.cancel(attempt.prefill, attempt.request_id)
            return 0.0
        waited = self.clock() - attempt.first_token_at
        self._pool.handover.observe(waited)
        if attempt.decode is not None:
            self.chooser.pairs.observe(attempt.prefill, attempt.decode, attempt.prompt_tokens, waited)
        self.metrics.handover_time.observe(waited)
        return waited

    def on_first_token(self, attempt: Attempt, computed: int, queue_s: float) -> None:
        """`computed`: prompt tokens that were not cached. `queue_s`: the time in the node's line."""
        took = self.clock() - attempt.submitted_at
        self.metrics.prefill_time.observe(max(took - queue_s, 0.0))
        if attempt.prefill is not None or attempt.decode is None:
            return
        member = self._pool.member(attempt.decode.node_id)
        if member is not None and member.has_reported and member.status.waiting == 0:
            member.rates.on_local_prefill(computed, took)

    def on_ended(
        self, attempt: Attempt | None, spec: SequenceSpec, hashes: PromptHashes, output: Sequence[int]
    ) -> None:
        if output and not spec.reads_ahead:
            self._answers.ended(len(output))
        if attempt is not None and attempt.decode is not None and attempt.decode_started and output:
            self.chooser.answered(attempt.decode, hashes, output)
            if spec.facts.job_id is not None:
                self.homes.remember(spec.facts.job_id, attempt.nodes, is_last_step=spec.facts.is_last_step)

    def turn_ended(self, decision: RoutingDecision, request_id: str, job_id: str, called: list[str] | None) -> None:
        """Tells the nodes that pin the turn which tools its answer called."""
        for node in (decision.prefill, decision.decode):
            if node is not None and node.pin_seconds:
                member = self._pool.member(node.node_id)
                if member is not None and member.info == node:
                    self._links.turn_ended(node, request_id, job_id, called)

    # --- what the dispatcher hears of the pool

    def on_cache_news(self, news: CacheNews) -> bool:
        return self.chooser.on_cache_news(news)

    def forget_prompts(self, node_id: str) -> None:
        self.chooser.forget_prompts(node_id)

    def forget_prefixes(self, node: NodeInfo) -> None:
        self.chooser.forget(node.node_id)
