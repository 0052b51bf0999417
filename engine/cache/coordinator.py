"""Several block tables for one request, one per KV cache group, kept in step with each other.

The kinds differ only in how much of a prefix they find: nothing without prefix caching, what the one group
finds when there is one, and what all groups agree on when there are more.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

from tandem.engine.cache.group_manager import (
    AttentionKind,
    ChunkedManager,
    FullAttentionManager,
    GroupManager,
    KVCacheGroup,
    SlidingWindowManager,
)
from tandem.engine.cache.pool import BlockPool
from tandem.engine.cache.state_slots import StateManager
from tandem.engine.request import Request

Tables = list[list[int]]
"""Per group, block ids in token order."""

_MANAGERS: dict[AttentionKind, type[GroupManager]] = {
    AttentionKind.FULL: FullAttentionManager,
    AttentionKind.SLIDING: SlidingWindowManager,
    AttentionKind.CHUNKED: ChunkedManager,
    AttentionKind.STATE: StateManager,
}


def hash_block_size(groups: Sequence[KVCacheGroup]) -> int:
    """How many tokens one hash of the chain covers: a size that every group's blocks are made of."""
    return math.gcd(*(group.block_size for group in groups))


class Coordinator(abc.ABC):
    def __init__(self, groups: Sequence[KVCacheGroup], pool: BlockPool) -> None:
        size = hash_block_size(groups)
        self.managers = [_MANAGERS[group.kind](i, group, pool, size) for i, group in enumerate(groups)]

    @abc.abstractmethod
    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[Tables, int]:
        """Blocks per group for the longest prefix of at most `max_tokens` that all groups have, and its length."""

    def num_blocks_needed(self, num_slots: int, hits: Tables, num_computed_tokens: int) -> int:
        return sum(
            manager.num_blocks_needed(num_slots, found, num_computed_tokens)
            for manager, found in zip(self.managers, hits, strict=True)
        )

    def num_blocks_missing(self, request_id: str, num_slots: int) -> int:
        missing = 0
        for manager in self.managers:
            missing += manager.num_blocks_missing(request_id, num_slots)
        return missing

    def adopt(self, request_id: str, hits: Tables, num_computed_tokens: int) -> None:
        for manager, found in zip(self.managers, hits, strict=True):
            manager.adopt(request_id, found, num_computed_tokens)

    def grow(self, request_id: str, num_slots: int) -> Tables:
        return [manager.grow(request_id, num_slots) for manager in self.managers]

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        for manager in self.managers:
            manager.cache_full_blocks(request, num_tokens)

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        for manager in self.managers:
            manager.drop_skipped_blocks(request_id, num_computed_tokens)

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        nearest = self.managers[0].horizon(request_id, num_lookahead_tokens)
        for manager in self.managers[1:]:
            nearest = min(nearest, manager.horizon(request_id, num_lookahead_tokens))
        return nearest

    def has_blocks(self, request_id: str) -> bool:
        return request_id in self.managers[0].tables

    def tables(self, request_id: str) -> Tables:
        """Copies: a request's own tables go on growing."""
        return [list(manager.tables.get(request_id, ())) for manager in self.managers]

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return sum(manager.max_blocks(num_tokens, max_new_tokens) for manager in self.managers)

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return all(manager.can_resume_at(request_id, num_tokens) for manager in self.managers)

    def forget_after(self, request_id: str, num_tokens: int) -> None:
        for manager in self.managers:
            manager.forget_after(request_id, num_tokens)

    def free(self, request_id: str) -> None:
        for manager in self.managers:
            manager.free(request_id)


class NoCacheCoordinator(Coordinator):
    """Without prefix caching there are no hits, and a request's horizon is its number of blocks."""

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[Tables, int]:
        return [[] for _ in self.managers], 0

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Without prefix caching no block is cached."""


class UnitaryCoordinator(Coordinator):
    """One group, whose hit is the answer."""

    def __init__(self, groups: Sequence[KVCacheGroup], pool: BlockPool) -> None:
        super().__init__(groups, pool)
        (self._manager,) = self.managers

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[Tables, int]:
        size = self._manager.block_size
        hits = self._manager.find_longest_hit(block_hashes, max_tokens, size)
        return [hits], len(hits) * size


class HybridCoordinator(Coordinator):
    """Groups of several kinds: each may shorten the hit that the one before it found, round after round, until a whole
    round keeps the same length. Lengths are multiples of every group's block size, so the loop is finite."""

    def __init__(self, groups: Sequence[KVCacheGroup], pool: BlockPool) -> None:
        super().__init__(groups, pool)
        self._alignment = math.lcm(*(group.block_size for group in groups))
        # Full attention first: its answer is cheap, and bounds all the others.
        self._order = sorted(self.managers, key=lambda manager: not isinstance(manager, FullAttentionManager))

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[Tables, int]:
        hits: Tables = [[] for _ in self.managers]
        length = max_tokens
        while True:
            candidate = length
            for manager in self._order:
                found = manager.find_longest_hit(block_hashes, candidate, self._alignment)
                hits[manager.index] = found
                candidate = len(found) * manager.block_size
            if candidate == length:
                return hits, length
            length = candidate


def make_coordinator(groups: Sequence[KVCacheGroup], pool: BlockPool) -> Coordinator:
    if not pool.caching:
        return NoCacheCoordinator(groups, pool)
    return (UnitaryCoordinator if len(groups) == 1 else HybridCoordinator)(groups, pool)
