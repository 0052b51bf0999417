"""The KV cache as the scheduler sees it (`KVCacheManager`): find a prefix, allocate slots for tokens, free them.

A coordinator keeps a request's block tables in all groups in step with each other, and finds a prefix on which they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tandem.base.errors import InternalError
from tandem.engine.cache.group_manager import (
    AttentionKind,
    ChunkedManager,
    FullAttentionManager,
    GroupManager,
    KVCacheGroup,
    SlidingWindowManager,
)
from tandem.engine.cache.pool import BlockPool
from tandem.engine.cache.wings import StateTables, states_wing
from tandem.engine.request import Request
from tandem.kvtransfer.base import NULL_BLOCK_ID

Tables = list[list[int]]
"""For each group, block ids in token order."""

_MANAGERS: dict[AttentionKind, type[GroupManager]] = {
    AttentionKind.FULL: FullAttentionManager,
    AttentionKind.SLIDING: SlidingWindowManager,
    AttentionKind.CHUNKED: ChunkedManager,
}


def _manager_of(group: KVCacheGroup) -> Callable[[int, KVCacheGroup, BlockPool, int], GroupManager]:
    return states_wing().tables if group.kind is AttentionKind.STATE else _MANAGERS[group.kind]


def hash_block_size(groups: Sequence[KVCacheGroup]) -> int:
    """How many tokens one hash of the chain covers: the largest size that divides every group's block size."""
    return math.gcd(*(group.block_size for group in groups))


class Coordinator:
    """Calls the manager of every group, and finds a prefix that all groups have cached."""

    def __init__(self, groups: Sequence[KVCacheGroup], pool: BlockPool) -> None:
        size = hash_block_size(groups)
        self.managers = [_manager_of(group)(i, group, pool, size) for i, group in enumerate(groups)]
        self._caching = pool.caching
        self._alignment = math.lcm(*(group.block_size for group in groups))
        # Full attention goes first: its look-up is cheap, and its hit bounds all the others.
        self._order = sorted(self.managers, key=lambda manager: not isinstance(manager, FullAttentionManager))

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[Tables, int]:
        """Returns the blocks, per group, of the longest prefix of at most `max_tokens` that every group has cached, and its length.
        Each group may shorten the hit that the group before it found, round after round, until a round keeps the length. Every
        shorter length is a multiple of all block sizes, so the loop ends."""
        hits: Tables = [[] for _ in self.managers]
        length = max_tokens
        while True:
            candidate = length
            for manager in self._order:
                found = manager.find_longest_hit(block_hashes, candidate, self._alignment)
                hits[manager.index] = found
                candidate = len(found) * manager.block_size
            if candidate == length or len(self._order) == 1:
                return hits, candidate
            length = candidate

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
        if not self._caching:
            return
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
        """Returns copies, because a request's own tables grow later."""
        return [list(manager.tables.get(request_id, ())) for manager in self.managers]

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return sum(manager.max_blocks(num_tokens, max_new_tokens) for manager in self.managers)

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return all(manager.can_resume_at(request_id, num_tokens) for manager in self.managers)

    def forget_after(self, request_id: str, num_tokens: int) -> None:
        for manager in self.managers:
            manager.forget_after(request_id, num_tokens)

    def free(self, request_id: str, spare_after: int | None) -> None:
        for manager in self.managers:
            manager.free(request_id, spare_after)


class KVCacheManager:
    """Allocates blocks for requests. A request's tokens, as `allocate_slots` and `extend_slots` see them:

        | computed | hits | external | new | lookahead |
                            <-------- slots ---------->

    `computed` tokens already have KV and blocks, `hits` are in the prefix cache, `external` are loaded by a connector, `new`
    are computed in this step, and `lookahead` is room for the next step's drafts.

    Allocation is all or nothing: when blocks run short, a request gets none.
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
        """`gives_up_last_block` shortens every prefix hit by a block, for requests that may get more than one token: drafts from
        hidden states need those of the token before the first new one, so it must be computed."""
        self.pool = BlockPool(num_blocks, len(groups), caching=caching)
        self.coordinator = Coordinator(groups, self.pool)
        self.hash_block_size = hash_block_size(groups)
        self._num_lookahead = num_lookahead_tokens
        self._gives_up_last_block = gives_up_last_block
        self._max_new_tokens = max_new_tokens + num_lookahead_tokens
        self._no_blocks: Tables = [[] for _ in groups]
        # The most tokens that one request can have while it has the whole pool to itself.
        self.max_request_tokens = self._longest_request(max_model_len)
        states = [manager for manager in self.coordinator.managers if isinstance(manager, StateTables)]
        self._states = states[0] if caching and states else None
        self.keeps_states = bool(states)
        self.checkpoints = None  # None without recurrent states or without prefix caching
        if self._states is not None and checkpoint_tokens:
            self.checkpoints = states_wing().checkpoints(
                self.coordinator.managers, self._states, checkpoint_tokens, num_lookahead_tokens
            )
        # Blocks that a connector is copying, once for each copy. They stay in use after their requests have freed them.
        self.reads: list[int] = []

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
        """Returns the cached blocks of the request's longest cached prefix, per group, and its length in tokens. It never covers
        the last token, which must be computed for logits to sample from."""
        if not self.pool.caching or request.skip_reading_prefix_cache:
            return self._no_blocks, 0
        hits, num_tokens = self.coordinator.find_longest_hit(request.block_hashes, request.num_tokens - 1)
        more_than_one = request.facts.sampling.max_tokens > request.num_output_tokens + 1
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
        """Allocates slots for a request that has no blocks yet. Returns its new blocks per group. Returns None, and changes
        nothing, when too few blocks are free.

        With `delay_caching` no block is cached, because the KV of the external tokens has not arrived.
        """
        request_id, coordinator = request.request_id, self.coordinator
        computed = num_hit_tokens + num_external_tokens
        end = computed + num_new_tokens
        num_slots = min(end + self._num_lookahead, self.max_request_tokens)
        if coordinator.num_blocks_needed(num_slots, hits, computed) > self.pool.num_free:
            return None
        coordinator.adopt(request_id, hits, computed)
        request.is_distrusted = False
        blocks = coordinator.grow(request_id, num_slots)
        if not delay_caching:
            coordinator.cache_full_blocks(request, end)
        request.allocation_horizon = coordinator.horizon(request_id, self._num_lookahead)
        return blocks

    def extend_slots(self, request: Request, num_new_tokens: int) -> Tables | None:
        """Allocates slots for a request that has blocks. Returns its new blocks per group. Returns None when too few blocks are
        free; then only blocks outside the attention window have been released.

        The scheduler calls it only beyond `request.allocation_horizon`, because up to there it would do nothing.
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
        coordinator.cache_full_blocks(request, end)
        request.allocation_horizon = coordinator.horizon(request_id, self._num_lookahead)
        return blocks

    def num_blocks_of_prompt(self, request: Request, hits: Tables | None, num_computed: int) -> int:
        """How many free blocks the request takes until all its present tokens are computed. With `hits` it begins with these
        blocks and with `num_computed` tokens that need no computing; without, it already has blocks."""
        num_tokens = min(request.num_tokens, self.max_request_tokens)
        total = 0
        for index, manager in enumerate(self.coordinator.managers):
            # With a sliding window, early blocks are freed while the prompt is computed.
            most = manager.max_blocks(num_tokens, self._max_new_tokens)
            if hits is None:
                table = manager.tables[request.request_id]
                kept = len(table) - table.count(NULL_BLOCK_ID)
                total += min(manager.num_blocks_missing(request.request_id, num_tokens), max(most - kept, 0))
            else:
                total += min(manager.num_blocks_needed(num_tokens, hits[index], num_computed), most)
        return total

    def num_blocks_ahead(self, request: Request, hits: Tables | None = None) -> int:
        """The most free blocks that the request may take until its end. With `hits` it begins with these blocks."""
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
        """How many blocks the request takes beyond those that it has, until it has `num_tokens` tokens. Blocks that it may still
        find in the prefix cache are counted, too."""
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
        """Rewinds the request to its first `num_tokens` tokens, the only ones whose KV is right. Keeps its blocks if it can go on
        from there, and frees them otherwise."""
        request_id = request.request_id
        self.coordinator.forget_after(request_id, num_tokens)
        if request.reports_its_prompt and not request.num_output_tokens:
            num_tokens = 0  # what is reported of a prompt is collected from its first token on
        if num_tokens > 0 and self.coordinator.can_resume_at(request_id, num_tokens):
            request.num_computed_tokens = num_tokens
            request.allocation_horizon = 0
        else:
            self.free(request)
            request.num_computed_tokens = 0

    def quarantine(self, request: Request, num_valid_tokens: int, blocks: frozenset[int]) -> None:
        """Takes blocks that a peer may still write to from the request. They hold none of its first `num_valid_tokens` tokens. No
        request uses them before `end_quarantine`."""
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

    def forget_names(self, request: Request, num_tokens: int) -> None:
        """Uncaches every block whose name, the hash of its content, is that of a block of this request with a token after its first
        `num_tokens`. Other requests may have computed such blocks, too."""
        names = request.block_hashes[num_tokens // self.hash_block_size :]
        for manager in self.coordinator.managers:
            manager.forget_named(names)

    def cached_blocks_from(self, request: Request, num_tokens: int) -> list[int]:
        """Returns the request's cached blocks that hold tokens after its first `num_tokens`."""
        return [
            block
            for manager in self.coordinator.managers
            for block in manager.cached_blocks_from(request.request_id, num_tokens)
        ]

    def first_token_in(self, request: Request, blocks: set[int]) -> int | None:
        """Returns the first of the request's tokens whose KV lies in one of `blocks`; None if none does."""
        tokens = (
            manager.first_token_of(i)
            for manager in self.coordinator.managers
            for i, block in enumerate(manager.tables.get(request.request_id, ()))
            if block in blocks
        )
        return min(tokens, default=None)

    def forget_uncomputed(self, request: Request) -> None:
        """Uncaches the request's blocks beyond its computed tokens."""
        self.coordinator.forget_after(request.request_id, request.num_computed_tokens)

    def free(self, request: Request) -> None:
        """What idle work has cached makes room before what others have."""
        self.forget_uncomputed(request)
        self.coordinator.free(request.request_id, max(request.num_cached_tokens, 0) if request.when_idle else None)
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
        """How many of the request's blocks no other request uses."""
        ref_counts = self.pool.ref_counts
        return sum(ref_counts[block] == 1 for table in self.coordinator.tables(request_id) for block in table)

    def take_state_copies(self) -> tuple[list[tuple[int, int]], list[int]]:
        """See StateTables.take_copies."""
        return self._states.take_copies() if self._states is not None else ([], [])

    def release_checkpoints(self, blocks: list[int]) -> None:
        """Releases checkpoint blocks after the step that copied from or to them is booked."""
        if self._states is not None:
            self._states.release(blocks)

    def begin_reads(self, blocks: Sequence[int]) -> None:
        """A connector begins to copy these blocks. They are not freed before `end_reads`, even if their requests end."""
        self.pool.touch(blocks)
        self.reads += blocks

    def end_reads(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.reads.remove(block)
        self.pool.release(blocks)

    def reset_prefix_cache(self) -> None:
        self.pool.reset()

    def check_integrity(self, owners: dict[str, Request]) -> None:
        """Checks the pool's invariants and these: exactly the `owners` have blocks, a table covers its request's computed tokens,
        and a cached block has the hash that its request would look up. Raises an InternalError."""
        managers = self.coordinator.managers
        tables = [table for manager in managers for table in manager.tables.values()]
        if self._states is not None:
            tables.append(self._states.held)
        tables.append(self.reads)
        self.pool.check_integrity(tables)
        for manager in managers:
            if manager.tables.keys() != owners.keys():
                odd = manager.tables.keys() ^ owners.keys()
                raise InternalError(f"group {manager.index}: blocks and owners differ for {sorted(odd)}")
            for request in owners.values():
                manager.check_table(request)
