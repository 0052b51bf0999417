"""The KV cache as the scheduler sees it, with one answer from all groups' block tables: find a prefix, get slots for tokens, give them back.

Coordinators keep a request's tables in step with each other. Their kinds differ only in how much of a prefix they find: nothing without
prefix caching, what the one group finds when there is one, and what all groups agree on when there are more.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence

from tandem.engine.cache.checkpoints import Checkpoints
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
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.errors import InternalError

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


class KVCacheManager:
    """A request's tokens, as `allocate_slots` sees them:

        | computed | found | external | new | lookahead |
                             <-------- slots ---------->

    `computed` tokens have KV and blocks already, `found` are in the prefix cache, `external` are loaded by a connector,
    `new` are computed in this step, and `lookahead` is room for the next step's drafts.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        *,
        caching: bool,
        max_model_len: int,
        num_lookahead_tokens: int = 0,
        max_new_tokens: int,
        checkpoint_tokens: int = 1,
        gives_up_last_block: bool = False,
    ) -> None:
        """`gives_up_last_block`: of a prefix that is found, because hidden states before the first new token are wanted, where more than one token is."""
        self.pool = BlockPool(num_blocks, len(groups), caching=caching)
        self.coordinator = make_coordinator(groups, self.pool)
        self._num_lookahead = num_lookahead_tokens
        self._gives_up_last_block = gives_up_last_block
        self._max_new_tokens = max_new_tokens + num_lookahead_tokens
        self._no_blocks: Tables = [[] for _ in groups]
        # The longest that one request can become, when it has the whole pool to itself.
        self.max_request_tokens = self._longest_request(max_model_len)
        states = [manager for manager in self.coordinator.managers if isinstance(manager, StateManager)]
        self._states = states[0] if caching and states else None
        self.keeps_states = bool(states)
        self.checkpoints = None  # without states, or without prefix caching
        if self._states is not None and checkpoint_tokens:
            self.checkpoints = Checkpoints(
                self.coordinator.managers, self._states, checkpoint_tokens, num_lookahead_tokens
            )
        # Blocks that a connector copies, each as often as it is copied: in use even when their requests give them up.
        self._reads: list[int] = []
        # Blocks that were free before this step and hold its tokens now.
        self._fresh: list[int] = []

    def _longest_request(self, max_model_len: int) -> int:
        low, high = 0, max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.coordinator.max_blocks(middle, self._max_new_tokens) <= self.pool.num_usable:
                low = middle
            else:
                high = middle - 1
        return low

    def find_prefix(self, request: Request) -> tuple[Tables, int]:
        """Cached blocks for the request's beginning, and how many tokens that is. The last token is kept back:
        without computing at least one there is nothing to sample from."""
        if not self.pool.caching or request.skip_reading_prefix_cache:
            return self._no_blocks, 0
        hits, num_tokens = self.coordinator.find_longest_hit(request.block_hashes, request.num_tokens - 1)
        more_than_one = request.sampling.max_tokens > request.num_output_tokens + 1
        if self._gives_up_last_block and num_tokens and more_than_one:
            return self.coordinator.find_longest_hit(request.block_hashes, num_tokens - 1)
        return hits, num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hits: Tables,
        num_hit_tokens: int = 0,
        num_external_tokens: int = 0,
        delay_caching: bool = False,
    ) -> Tables | None:
        """Slots for a request that has no blocks yet. New blocks per group, or None when there are not enough,
        and then nothing has changed.

        With `delay_caching` nothing is cached: the KV of the external tokens is not here yet.
        """
        request_id, coordinator = request.request_id, self.coordinator
        computed = num_hit_tokens + num_external_tokens
        end = computed + num_new_tokens
        num_slots = min(end + self._num_lookahead, self.max_request_tokens)
        if coordinator.num_blocks_needed(num_slots, hits, computed) > self.pool.num_free:
            return None
        coordinator.adopt(request_id, hits, computed)
        blocks = coordinator.grow(request_id, num_slots)
        # Blocks that a connector writes to are not zeroed, even where it fills a block only in part.
        for manager, new in zip(coordinator.managers, blocks, strict=True):
            table = manager.tables[request_id]
            external_end = manager.num_loaded_blocks(computed) if num_external_tokens else 0
            self._fresh += new[max(external_end - (len(table) - len(new)), 0) :]
        if not delay_caching:
            coordinator.cache_full_blocks(request, end)
        request.allocation_horizon = coordinator.horizon(request_id, self._num_lookahead)
        return blocks

    def extend_slots(self, request: Request, num_new_tokens: int) -> Tables | None:
        """Slots for a request that has blocks. New blocks per group, or None when there are not enough, and then
        nothing has changed, except that blocks outside the attention window have been released.

        Called only beyond `request.allocation_horizon`: up to there it would do nothing.
        """
        request_id, coordinator = request.request_id, self.coordinator
        computed = request.num_computed_tokens
        end = computed + num_new_tokens
        num_slots = min(end + self._num_lookahead, self.max_request_tokens)
        coordinator.drop_skipped_blocks(request_id, computed)
        needed = coordinator.num_blocks_missing(request_id, num_slots)
        if needed > self.pool.num_free:
            return None
        blocks = self._no_blocks
        if needed:
            blocks = coordinator.grow(request_id, num_slots)
            for new in blocks:
                self._fresh += new
        coordinator.cache_full_blocks(request, end)
        request.allocation_horizon = coordinator.horizon(request_id, self._num_lookahead)
        return blocks

    def num_blocks_of_prompt(self, request: Request, hits: Tables | None, num_computed: int) -> int:
        """How many free blocks the request takes until all the tokens that it has now are computed. With `hits` it begins with
        these, and with `num_computed` tokens that need no computing; without, it has its blocks already."""
        num_tokens = min(request.num_tokens, self.max_request_tokens)
        total = 0
        for index, manager in enumerate(self.coordinator.managers):
            # A window's early blocks come back while the prompt is computed.
            most = manager.max_blocks(num_tokens, self._max_new_tokens)
            if hits is None:
                table = manager.tables[request.request_id]
                kept = len(table) - table.count(NULL_BLOCK_ID)
                total += min(manager.num_blocks_missing(request.request_id, num_tokens), max(most - kept, 0))
            else:
                total += min(manager.num_blocks_needed(num_tokens, hits[index], num_computed), most)
        return total

    def num_blocks_ahead(self, request: Request, hits: Tables | None = None) -> int:
        """How many free blocks the request takes, at most, until its end. With `hits` it begins with these."""
        last = min(request.length_limit + self._num_lookahead, self.max_request_tokens)
        ahead = self.coordinator.max_blocks(last, self._max_new_tokens)
        for index, manager in enumerate(self.coordinator.managers):
            if hits is None:
                table = manager.tables[request.request_id]
                ahead -= len(table) - table.count(NULL_BLOCK_ID)
            else:
                ahead -= manager.num_kept_of(hits[index])
        return max(ahead, 0)

    def num_blocks_until(self, request: Request, num_tokens: int) -> int:
        """How many blocks the request takes beyond those that it has, until it has `num_tokens` tokens. One without blocks may find
        some in the cache: those count as taken."""
        last = min(num_tokens + self._num_lookahead, self.max_request_tokens)
        missing = 0
        for manager in self.coordinator.managers:
            most = manager.max_blocks(last, self._max_new_tokens)
            missing += max(most - manager.num_kept(request.request_id), 0)
        return missing

    def cache_loaded(self, request: Request) -> None:
        """Caches the blocks that a connector has loaded and verified, up to the request's computed tokens."""
        self.coordinator.cache_full_blocks(request, request.num_computed_tokens)
        request.allocation_horizon = self.coordinator.horizon(request.request_id, self._num_lookahead)

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens' KV is right. Keeps the request's blocks if it can go on from
        there, and gives them back otherwise."""
        request_id = request.request_id
        self.coordinator.forget_after(request_id, num_tokens)
        if num_tokens > 0 and self.coordinator.can_resume_at(request_id, num_tokens):
            request.num_computed_tokens = num_tokens
            request.allocation_horizon = 0
        else:
            self.free(request)
            request.num_computed_tokens = 0

    def quarantine(self, request: Request, num_valid_tokens: int, blocks: frozenset[int]) -> None:
        """A peer may still write to these blocks, which hold nothing of the first `num_valid_tokens` tokens: the
        request goes on without them, and nothing uses them before `end_quarantine`."""
        self.coordinator.forget_after(request.request_id, num_valid_tokens)
        for manager in self.coordinator.managers:
            manager.quarantine(request.request_id, blocks)
        request.allocation_horizon = 0

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        self.pool.end_quarantine(blocks)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Removes these blocks from the prefix cache."""
        for block in blocks:
            self.pool.uncache(block)

    def cached_blocks_from(self, request: Request, num_tokens: int) -> list[int]:
        """The request's cached blocks that hold tokens after its first `num_tokens`."""
        return [
            block
            for manager in self.coordinator.managers
            for block in manager.cached_blocks_from(request.request_id, num_tokens)
        ]

    def first_token_in(self, request: Request, blocks: set[int]) -> int | None:
        """The first of the request's tokens that lies in one of `blocks`."""
        first = None
        for manager in self.coordinator.managers:
            for i, block in enumerate(manager.tables.get(request.request_id, ())):
                if block in blocks:
                    token = manager.first_token_of(i)
                    first = token if first is None else min(first, token)
                    break
        return first

    def forget_uncomputed(self, request: Request) -> None:
        """Uncaches blocks whose tokens were never computed."""
        self.coordinator.forget_after(request.request_id, request.num_computed_tokens)

    def free(self, request: Request) -> None:
        self.forget_uncomputed(request)
        self.coordinator.free(request.request_id)
        if self.checkpoints is not None:
            self.checkpoints.forget(request.request_id)
        request.allocation_horizon = 0

    def drop_skipped_blocks(self, request: Request) -> None:
        self.coordinator.drop_skipped_blocks(request.request_id, request.num_computed_tokens)

    def block_ids(self, request_id: str) -> Tables:
        return self.coordinator.tables(request_id)

    def has_blocks(self, request_id: str) -> bool:
        return self.coordinator.has_blocks(request_id)

    def num_blocks_of(self, request_id: str) -> int:
        return sum(len(table) - table.count(NULL_BLOCK_ID) for table in self.coordinator.tables(request_id))

    def num_blocks_of_one(self, request_id: str) -> int:
        """Those of its blocks that no other request uses."""
        ref_counts = self.pool.ref_counts
        return sum(ref_counts[block] == 1 for table in self.coordinator.tables(request_id) for block in table)

    def take_fresh_blocks(self) -> list[int]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_state_copies(self) -> tuple[list[tuple[int, int]], list[int]]:
        """See StateManager.take_copies."""
        return self._states.take_copies() if self._states is not None else ([], [])

    def release_checkpoints(self, blocks: list[int]) -> None:
        """The step that copied them, or to them, is booked."""
        if self._states is not None:
            self._states.release(blocks)

    def begin_reads(self, blocks: Sequence[int]) -> None:
        """A connector copies these blocks, which are in use: nothing else uses them before the copies end."""
        self.pool.touch(blocks)
        self._reads += blocks

    def end_reads(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._reads.remove(block)
        self.pool.release(blocks)

    def reset_prefix_cache(self) -> None:
        self.pool.reset()

    def check_integrity(self, owners: dict[str, Request]) -> None:
        """`owners` are the requests that should have blocks. Besides the pool's own invariants: no other
        request has blocks, a table covers the computed tokens, and a cached block has the hash that its request would look up."""
        managers = self.coordinator.managers
        tables = [table for manager in managers for table in manager.tables.values()]
        if self._states is not None:
            tables.append(self._states.held)
        tables.append(self._reads)
        self.pool.check_integrity(tables)
        for manager in managers:
            if manager.tables.keys() != owners.keys():
                odd = manager.tables.keys() ^ owners.keys()
                raise InternalError(f"group {manager.index}: blocks and owners differ for {sorted(odd)}")
            for request in owners.values():
                manager.check_table(request)
