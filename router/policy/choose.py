"""Chooses the nodes of each request, from the nodes in view, what they likely have cached, and the policy.

`Chooser` keeps what it needs for that, and does no I/O and reads no clock but the pool's, so a simulation runs
it exactly as the router does. The rest are pure functions of a snapshot. Each policy ranks the candidates of a
pool; `decide` does what is the same for all.

A decision also names two nodes that share a request's KV: the source, which likely has more of the prompt
than the node that computes it, and the mirror, which copies the request's blocks while it runs. For traces,
`alternatives` lists the best nodes that were not chosen, with the wait that was expected of each.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.base.errors import Unavailable
from tandem.router.config import LocalPrefill, PolicyName
from tandem.router.policy.pairs import PairTimes
from tandem.router.policy.views import (
    NodeView,
    PoolSnapshot,
    RoutingDecision,
    RoutingRequest,
    best_prefill_rate,
    decode_wait_s,
    first_by_rendezvous,
    prefill_costs_s,
    prefill_wait_s,
    reason_to_prefill_locally,
)
from tandem.router.pool import NodePool
from tandem.router.prefixes import CachedBlocks, Overlaps, PrefixRecord, PromptHashes
from tandem.wire.kv_events import DEVICE_MEDIUM
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import CacheNews

RECENT_BLOCKS = 8192


class Chooser:
    """Chooses each request's nodes, and records which prompts went where."""

    def __init__(self, pool: NodePool, policy: PolicyName, local_prefill: LocalPrefill, cached_blocks: int = 0) -> None:
        """`cached_blocks`: how many of the blocks that nodes report as cached are remembered."""
        self._pool = pool
        self._name = policy
        self.pairs = PairTimes(pool.now)
        self._policy = make_policy(policy, local_prefill, self.pairs)
        # Keeps only the latest prompts of a node that reports its cache: those that it has not computed yet.
        self._record = PrefixRecord()
        self.cached = CachedBlocks(self._record.bits, cached_blocks)
        self._turn = 0

    def choose(self, request: RoutingRequest, hashes: PromptHashes) -> RoutingDecision:
        """Returns a decision, and records that the prompt was sent there. Raises Unavailable when no node can
        take it."""
        self._turn += 1
        content = request.content
        if content is None:
            content = self._pool.view.content_for(self._turn, vector=request.makes_vector)
        nodes, request = self._known(request, content, hashes)
        decode = self._pool.view.shortlist_of(content).decode
        try:
            decision = at_mirror(request, decode.views) or self._policy(nodes, request)
        except Unavailable as error:
            if request.needs_version <= self._pool.oldest_version:
                raise
            raise Unavailable(
                f"{error} that speaks version {request.needs_version} of Tandem's messages, which a field of this request "
                "needs: leave the field out, or try again when every node has that version"
            ) from error
        # Computing a vector again is cheaper than copying its prompt's KV, so it gets no mirror.
        names = decode.names if not request.makes_vector else ()
        decision = with_cache_peers(decision, nodes, request.cached, decode.views, names)
        decision = msgspec.structs.replace(decision, first_token_s=expected_first_token_s(decision, nodes, request))
        chosen = [node for node in (decision.prefill, decision.decode) if node is not None]
        for block_size in {node.block_size for node in chosen}:
            names = [node.node_id for node in chosen if node.block_size == block_size]
            self._note(names, self.marks_of(hashes, block_size))
        return decision

    def alternatives(
        self, request: RoutingRequest, hashes: PromptHashes, decision: RoutingDecision
    ) -> list[Alternative]:
        """Returns the chosen nodes and the best ones that were not chosen. Call it just after the decision
        was made."""
        content = next((node.content for node in (decision.decode, decision.prefill) if node is not None), None)
        return alternatives(*self._known(request, content, hashes), decision)

    def _known(
        self, request: RoutingRequest, content: str | None, hashes: PromptHashes
    ) -> tuple[PoolSnapshot, RoutingRequest]:
        """Returns the nodes that the policy ranks, and the request with what each of them likely has
        cached."""
        levels = {
            size: (self.cached.levels(of_size), self._record.levels(of_size))
            for size in self._pool.block_sizes
            if (of_size := hashes.of(size))
        }
        overlaps = Overlaps(self._record.bits, levels)
        avoid = request.avoid
        if request.needs_version > self._pool.oldest_version:
            avoid |= self._pool.older_than(request.needs_version)
        request = msgspec.structs.replace(request, content=content, turn=self._turn, avoid=avoid)
        nodes = self.candidates(request, overlaps)
        views = (*nodes.prefill, *nodes.decode)
        cached = overlaps.tokens_of(view.info for view in views)
        if not cached:
            return nodes, request
        loading = {
            view.info.node_id: seconds
            for view in views
            if view.status.tiers and (seconds := self._loading_s(view, cached, hashes))
        }
        return nodes, msgspec.structs.replace(request, cached=cached, loading_s=loading)

    def _loading_s(self, node: NodeView, cached: Mapping[str, int], hashes: PromptHashes) -> float:
        """Seconds to load the part of the prefix that lies in the node's tier, by the node's own
        measurements; 0 before any."""
        size = node.info.block_size
        found = hashes.of(size)[: cached.get(node.node_id, 0) // size]
        blocks, medium = self.cached.in_tier(node.node_id, found)
        for tier in node.status.tiers if blocks else ():
            if tier.name.upper() == medium and tier.loaded_tokens:
                return blocks * size * tier.loading_seconds / tier.loaded_tokens
        return 0.0

    def candidates(self, request: RoutingRequest, overlaps: Overlaps) -> PoolSnapshot:
        """Returns the nodes that the policy ranks."""
        shortlist = self._pool.view.shortlist_of(request.content or "")
        return shortlist.of(self._name, request, overlaps, self._pool.handover.value)

    def answered(self, node: NodeInfo, hashes: PromptHashes, output: Sequence[int]) -> None:
        """Records that the prompt and its answer are now cached on the decode node: a chat's next turn begins
        with them."""
        self._note([node.node_id], self._record.marks_of(hashes.with_output(node.block_size, output)))

    def marks_of(self, hashes: PromptHashes, block_size: int) -> list[int]:
        """Returns the hashes that stand for the prompt in the record, here and in sibling processes."""
        return self._record.marks_of(hashes.of(block_size))

    def sent_elsewhere(self, node_id: str, marks: Sequence[int]) -> None:
        """Records a prompt that a sibling process sent to the node."""
        self._note([node_id], marks)

    def _note(self, node_ids: Sequence[str], marks: Sequence[int]) -> None:
        """Records prompts, for each node no more blocks than its last status says it has. A node that has left is not recorded: nothing
        would forget it again."""
        members = [member for node_id in node_ids if (member := self._pool.member(node_id)) is not None]
        for member in members:
            if member.has_reported:
                blocks, node_id = member.status.total_blocks, member.node_id
                self._record.set_capacity(node_id, min(blocks, RECENT_BLOCKS) if self.cached.knows(node_id) else blocks)
        if members:
            self._record.note([member.node_id for member in members], marks)

    def on_cache_news(self, news: CacheNews) -> bool:
        """Takes a node's cache news. Returns False when a message is missing; the caller then asks for the
        whole list."""
        was_known = self.cached.knows(news.node_id)
        is_whole = self.cached.on_news(news)
        for change in news.changes if was_known else ():
            if not change.is_stored and change.medium == DEVICE_MEDIUM:
                self._record.evicted(news.node_id, array("Q", change.hashes))
        return is_whole

    def forget_prompts(self, node_id: str) -> None:
        """The node has emptied its cache. Forgets what this router sent there; the node's own news covers
        what it reported."""
        self._record.emptied(node_id)

    def forget(self, node_id: str) -> None:
        """Forgets everything about the node's cache, because the node is gone or has a new epoch."""
        self.cached.forget(node_id)
        self._record.forget(node_id)


def at_mirror(request: RoutingRequest, decode: Mapping[str, NodeView]) -> RoutingDecision | None:
    """Sends a request whose node is gone to the mirror of its KV. None when it has no mirror, or the mirror
    is not in view. `decode`: the decode nodes in view, by name."""
    mirror = request.mirror
    if mirror is None or mirror.node_id in request.avoid:
        return None
    view = decode.get(mirror.node_id)
    if view is None or view.info != mirror:
        return None
    return RoutingDecision(None, mirror, f"{mirror.node_id} has copies of its KV")


def with_cache_peers(
    decision: RoutingDecision,
    candidates: PoolSnapshot,
    cached: Mapping[str, int],
    decode: Mapping[str, NodeView],
    names: Sequence[str],
) -> RoutingDecision:
    """Adds the source and the mirror to the decision. `cached`: by node, leading prompt tokens that it likely
    has. `names`: the names of `decode`, in order."""
    reader = decision.prefill or decision.decode
    source = mirror = None
    if reader is not None and reader.tier_endpoint:
        nodes = [view.info for view in (*candidates.prefill, *candidates.decode) if view.info.tier_endpoint]
        best = max(nodes, key=lambda node: cached.get(node.node_id, 0), default=reader)
        if cached.get(best.node_id, 0) >= cached.get(reader.node_id, 0) + reader.block_size:
            source = best
    if decision.decode is not None and decision.decode.mirrors:
        mirror = _next_after(decision.decode, decode, names)
    if source is None and mirror is None:
        return decision
    return msgspec.structs.replace(decision, source=source, mirror=mirror)


def expected_first_token_s(
    decision: RoutingDecision, candidates: PoolSnapshot, request: RoutingRequest
) -> float | None:
    """Returns when the decision's first token is expected, in seconds. None while no rate is measured."""
    reader = decision.prefill or decision.decode
    nodes = candidates.decode if decision.prefill is None else candidates.prefill
    for node in nodes:
        if reader is not None and node.info.node_id == reader.node_id:
            assumed = node.rates.prefill_tokens_per_s or best_prefill_rate(nodes)
            return prefill_wait_s(node, request, assumed) if assumed else None
    return None


def _next_after(node: NodeInfo, decode: Mapping[str, NodeView], names: Sequence[str]) -> NodeInfo | None:
    """Returns the next node in a ring by names: each node mirrors one other, so requests of one node that
    share a prefix share one copy of it."""
    first = bisect_right(names, node.node_id)
    for step in range(len(names)):
        info = decode[names[(first + step) % len(names)]].info
        if info.mirrors and info.node_id != node.node_id:
            return info
    return None


SHOWN = 3  # the most unchosen nodes of each pool that a trace shows


class Alternative(msgspec.Struct, frozen=True):
    """A node that was chosen, or one of the best that were not."""

    node_id: str
    role: str
    chosen: bool
    expected_s: (
        # A prefill node: seconds until the first token. A decode node: its cost, as in `decode_wait_s`.
        float
    )
    cached_tokens: int  # prompt tokens that it likely has cached
    waiting_tokens: int  # queued prompt tokens, before this request's


def alternatives(pools: PoolSnapshot, request: RoutingRequest, decision: RoutingDecision) -> list[Alternative]:
    found: list[Alternative] = []
    for nodes, chosen, decode in ((pools.prefill, decision.prefill, False), (pools.decode, decision.decode, True)):
        wait_s, assumed = (decode_wait_s if decode else prefill_wait_s), best_prefill_rate(nodes)
        told = [
            Alternative(
                node.node_id,
                node.info.role.value,
                chosen is not None and node.node_id == chosen.node_id,
                wait_s(node, request, assumed),
                request.cached.get(node.node_id, 0),
                node.queued_tokens,
            )
            for node in nodes
        ]
        others = [one for one in told if not one.chosen]
        found += [one for one in told if one.chosen]
        found += heapq.nsmallest(SHOWN, others, key=lambda one: one.expected_s)
    return found


# How much longer a request may wait for the node that has more of its prompt cached, under prefix affinity.
AFFINITY_WAIT_S = 1.0


class RoutingPolicy(Protocol):
    def __call__(self, pools: PoolSnapshot, request: RoutingRequest) -> RoutingDecision:
        """Raises Unavailable when no node can take it."""
        ...


Ranker = Callable[[Sequence[NodeView], RoutingRequest, bool], tuple[NodeView, str]]


def _costs_s(nodes: Sequence[NodeView], request: RoutingRequest, decode: bool, assumed: float | None) -> list[float]:
    if decode:
        return [decode_wait_s(node, request, assumed) for node in nodes]
    return prefill_costs_s(nodes, request, assumed)


def _least_wait(nodes: Sequence[NodeView], request: RoutingRequest, decode: bool) -> tuple[NodeView, str]:
    assumed = best_prefill_rate(nodes)
    costs = _costs_s(nodes, request, decode, assumed)
    # Equal nodes take turns; otherwise the first idle node would get every request.
    least = min(costs)
    equals = [i for i, cost in enumerate(costs) if cost == least]
    best = equals[request.turn % len(equals)]
    wait_s = costs[best] if decode else prefill_wait_s(nodes[best], request, assumed)
    return nodes[best], f"{wait_s * 1000:.0f} ms"


def _round_robin(nodes: Sequence[NodeView], request: RoutingRequest, decode: bool) -> tuple[NodeView, str]:
    return sorted(nodes, key=lambda n: n.node_id)[request.turn % len(nodes)], f"turn {request.turn}"


def _prefix_affinity(nodes: Sequence[NodeView], request: RoutingRequest, decode: bool) -> tuple[NodeView, str]:
    least, why = _least_wait(nodes, request, decode)
    best = max(nodes, key=lambda n: request.cached.get(n.node_id, 0))
    cached = request.cached.get(best.node_id, 0)
    if cached == 0:
        return least, why

    costs_s = _costs_s(nodes, request, decode, best_prefill_rate(nodes))
    costs = dict(zip((node.node_id for node in nodes), costs_s, strict=True))
    if costs[best.node_id] - costs[least.node_id] > AFFINITY_WAIT_S:
        return least, f"{why}, {best.node_id} has {cached} tokens cached but is too busy"
    return best, f"{cached} tokens cached"


def _session_affinity(nodes: Sequence[NodeView], request: RoutingRequest, decode: bool) -> tuple[NodeView, str]:
    """By rendezvous hashing: a session stays on its node, and moves only when that node goes."""
    if request.session is None:
        return _least_wait(nodes, request, decode)
    by_id = {node.node_id: node for node in nodes}
    return by_id[first_by_rendezvous(by_id, request.session)], "its session"


def _home_first(rank: Ranker) -> Ranker:
    """Prefers the node that pins the job's last turn: the next turn begins with that KV, and is first in the
    node's line."""

    def ranked(nodes: Sequence[NodeView], request: RoutingRequest, decode: bool) -> tuple[NodeView, str]:
        for node in nodes:
            if node.node_id in request.home:
                return node, "its job's last turn is there"
        return rank(nodes, request, decode)

    return ranked


_RANKERS: dict[PolicyName, Ranker] = {
    PolicyName.LEAST_WAIT: _least_wait,
    PolicyName.ROUND_ROBIN: _round_robin,
    PolicyName.PREFIX_AFFINITY: _prefix_affinity,
    PolicyName.SESSION_AFFINITY: _session_affinity,
}


# These send a request where it waits least; the others where an operator wants it.
_BY_WAIT = (PolicyName.LEAST_WAIT, PolicyName.PREFIX_AFFINITY)


def make_policy(name: PolicyName, local_prefill: LocalPrefill, pairs: PairTimes | None = None) -> RoutingPolicy:
    """`pairs`: how far machines are from each other; None: that is not known."""
    rank = _RANKERS[name]
    if name not in _BY_WAIT:
        pairs = None

    def policy(pools: PoolSnapshot, request: RoutingRequest) -> RoutingDecision:
        return decide(pools, request, rank, name, local_prefill, pairs)

    return policy


def _allowed(nodes: Sequence[NodeView], request: RoutingRequest) -> Sequence[NodeView]:
    return [node for node in nodes if node.node_id not in request.avoid] if request.avoid else nodes


def decide(
    pools: PoolSnapshot,
    request: RoutingRequest,
    rank: Ranker,
    name: PolicyName,
    local_prefill: LocalPrefill,
    pairs: PairTimes | None = None,
) -> RoutingDecision:
    if request.home:
        rank = _home_first(rank)
    prefill_nodes, decode_nodes = _allowed(pools.prefill, request), _allowed(pools.decode, request)

    if request.makes_vector:
        readers = _allowed(pools.prompt_readers, request)
        if not readers:
            raise Unavailable("no prefill or aggregated node is ready to make vectors")
        node, why = rank(readers, request, False)
        alone = f"{name}: a vector, so {node.node_id} alone ({why})"
        if node.info.role is Role.AGGREGATED:
            return RoutingDecision(None, node.info, alone)
        return RoutingDecision(node.info, None, alone)
    if request.max_new_tokens == 1 and prefill_nodes:
        node, why = rank(prefill_nodes, request, False)
        return RoutingDecision(node.info, None, f"{name}: one token, so {node.node_id} alone ({why})")
    if not decode_nodes:
        raise Unavailable("no decode node is ready")

    decode, decode_why = rank(decode_nodes, request, True)
    chosen = f"decode {decode.node_id} ({decode_why})"
    if decode.info.role is Role.AGGREGATED:
        return RoutingDecision(None, decode.info, f"{name}: {decode.node_id} does both ({decode_why})")
    if not prefill_nodes:
        return RoutingDecision(None, decode.info, f"{name}: {chosen}; local, no prefill node is ready")
    if local_prefill is LocalPrefill.ALWAYS:
        return RoutingDecision(None, decode.info, f"{name}: {chosen}; local, always")

    if decode.status.left_out:
        prefill_nodes = [node for node in prefill_nodes if node.node_id not in decode.status.left_out]
        if not prefill_nodes:
            return RoutingDecision(
                None, decode.info, f"{name}: {chosen}; local, KV of every prefill node arrived wrong there"
            )
    prefill, prefill_why = rank(prefill_nodes, request, False)
    if pairs is not None:
        if not request.home and (near := pairs.nearer((prefill, decode), prefill_nodes, decode_nodes, request)):
            why = f"nearer than {prefill.node_id} and {decode.node_id}"
            if near[0] is not prefill:
                prefill, prefill_why = near[0], why
            if near[1] is not decode:
                decode, chosen = near[1], f"decode {near[1].node_id} ({why})"
        if longer_s := pairs.longer_s(prefill.info, decode.info, request.prompt_tokens):
            pools = msgspec.structs.replace(pools, handover_s=max(longer_s, pools.handover_s or 0.0))
    away = f"prefill {prefill.node_id} ({prefill_why})"
    if local_prefill is LocalPrefill.AUTO and request.is_measured:
        reason = reason_to_prefill_locally(pools, request, prefill, decode)
        if reason is not None:
            return RoutingDecision(None, decode.info, f"{name}: {chosen}; local, {reason}")
    return RoutingDecision(prefill.info, decode.info, f"{name}: {away}, {chosen}")
