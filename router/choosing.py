"""Chooses the nodes of each request, from the nodes in view, what they likely have cached, and the policy.

It does no I/O and reads no clock but the pool's, so a simulation runs it exactly as the router does.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from tandem.router.config import LocalPrefill, PolicyName
from tandem.router.policy import NodeView, PoolSnapshot, RoutingDecision, RoutingRequest, make_policy
from tandem.router.policy.choose import Alternative, alternatives, at_mirror, with_cache_peers
from tandem.router.pool import NodePool
from tandem.router.prefixes import CachedBlocks, Overlaps, PrefixRecord, PromptHashes
from tandem.wire.errors import Unavailable
from tandem.wire.kv_events import DEVICE_MEDIUM
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import CacheNews

RECENT_BLOCKS = 8192


class Chooser:
    """Chooses each request's nodes, and records which prompts went where."""

    def __init__(
        self, pool: NodePool, policy: PolicyName, local_prefill: LocalPrefill, cached_blocks: int = 0
    ) -> None:
        """`cached_blocks`: how many of the blocks that nodes report as cached are remembered."""
        self._pool = pool
        self._name = policy
        self._policy = make_policy(policy, local_prefill)
        # For a node that reports its cache, this holds only the latest prompts, which it has not computed
        # yet.
        self._record = PrefixRecord()
        self.cached = CachedBlocks(self._record.bits, cached_blocks)
        self._turn = 0

    def choose(self, request: RoutingRequest, hashes: PromptHashes) -> RoutingDecision:
        """Returns a decision, and records that the prompt was sent there. Raises Unavailable when no node can
        take it."""
        self._turn += 1
        content = request.content
        if content is None:
            content = self._pool.content_for(self._turn, vector=request.makes_vector)
        nodes, request = self._known(request, content, hashes)
        decode = self._pool.shortlist_of(content).decode
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
        content = next(
            (node.content for node in (decision.decode, decision.prefill) if node is not None), None
        )
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
        shortlist = self._pool.shortlist_of(request.content or "")
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
        """Records prompts, for each node no more blocks than its last status says it has."""
        for node_id in node_ids:
            member = self._pool.member(node_id)
            if member is not None and member.status is not None:
                blocks = member.status.total_blocks
                self._record.set_capacity(
                    node_id, min(blocks, RECENT_BLOCKS) if self.cached.knows(node_id) else blocks
                )
        self._record.note(node_ids, marks)

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
