"""The blocks of recurrent states. A layer's state summarizes all tokens before, and has the same size for one token as for a thousand.

A request's states fill `blocks_per_request` blocks of the pool, which are taken together with its first slots and released
together at its end. They hold the states after its last computed token only.

For later prompts, the states after some tokens of a prompt are copied to blocks of their own: a checkpoint. It is cached under
the hash of those tokens and evicted like any block. A request that finds one copies it to its own blocks. The scheduler names
the blocks that the next step copies before it computes, and the checkpoint's blocks stay in use until that step is booked:

    a step that ends at token n        leaves the states after n in the request's blocks
    the next step of that request      copies them to free blocks (the checkpoint), then computes on
    a request with the first n tokens  copies the checkpoint to its own blocks, then computes from n on

A request that is rewound to an earlier token begins again, maybe from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.cache.pool import BlockPool
from tandem.engine.cache.wings import StateTables
from tandem.engine.request import Request
from tandem.kvtransfer.base import NULL_BLOCK_ID

_NEVER = 1 << 62  # more tokens than any request has


class StateManager(StateTables):
    """The block tables of a group of recurrent states, and its checkpoints."""

    def __init__(self, index: int, group: KVCacheGroup, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(index, group, pool, hash_block_size)
        if group.blocks_per_request < 1:
            raise ConfigurationError(
                f"a group of states needs at least 1 block for each request, not {group.blocks_per_request}"
            )
        self._count = group.blocks_per_request
        # Blocks of the checkpoint that a request found, between its `adopt` and its `grow`.
        self._found: dict[str, list[int]] = {}
        # The checkpoints that each request has made: (number of tokens, their hash).
        self._kept: dict[str, list[tuple[int, bytes]]] = {}
        self._copies: list[tuple[int, int]] = []  # (from, to) in the step that is being planned
        self._of_copies: list[int] = []  # the checkpoint blocks that these copies read or write
        self.held: list[int] = []

    # --- what a prompt finds

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Returns null blocks, and in the last place the checkpoint's first block, from which `_blocks_of` finds the others."""
        per_block = self._hashes_per_block
        for places in range(min(max_tokens // self.block_size, len(block_hashes) // per_block), 0, -1):
            if places * self.block_size % alignment:
                continue
            blocks = self._lookup(block_hashes[places * per_block - 1])
            if blocks is not None:
                return [NULL_BLOCK_ID] * (places - 1) + blocks[:1]
        return []

    def _names(self, block_hash: bytes) -> list[bytes]:
        """The hashes that a checkpoint's blocks are registered under: the tokens' hash, and that hash with a number."""
        return [block_hash, *(b"%b.%d" % (block_hash, i) for i in range(1, self._count))]

    def _lookup(self, block_hash: bytes) -> list[int] | None:
        blocks = []
        for name in self._names(block_hash):
            block = self._pool.lookup(self.index, name)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _blocks_of(self, hits: Sequence[int]) -> list[int]:
        """All blocks of the checkpoint that `find_longest_hit` found."""
        if not hits:
            return []
        blocks = self._lookup(self._pool.hashes[hits[-1]])
        if blocks is None:
            raise InternalError(f"the checkpoint in block {hits[-1]} is not whole")
        return blocks

    # --- a request's own blocks

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Does nothing: the next token reads all states."""

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return self._count

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return False

    def num_kept_of(self, hits: Sequence[int]) -> int:
        return 0

    def num_blocks_needed(self, num_slots: int, hits: Sequence[int], num_computed_tokens: int) -> int:
        """The same with a checkpoint as without: if no more blocks are free, the request takes over the checkpoint's."""
        return self._count

    def num_blocks_missing(self, request_id: str, num_slots: int) -> int:
        return self._count - len(self.tables[request_id])

    def first_token_of(self, index: int) -> int:
        return 0

    def adopt(self, request_id: str, hits: Sequence[int], num_computed_tokens: int) -> None:
        """Begins an empty table, and holds the checkpoint that was found. A connector that loads tokens beyond the hit also loads
        the states after them, so the checkpoint is not needed then."""
        self.tables[request_id] = []
        self._num_cached[request_id] = 0
        if len(hits) * self.block_size == num_computed_tokens and hits:
            found = self._found[request_id] = self._blocks_of(hits)
            self._pool.touch(found)

    def grow(self, request_id: str, num_slots: int) -> list[int]:
        """Takes blocks for the states, and plans copies of the checkpoint that was found. If too few blocks are free, the request
        takes over the checkpoint's blocks that no other request uses. Returns the new blocks."""
        table, pool = self.tables[request_id], self._pool
        found = self._found.pop(request_id, None)
        if found is None:
            blocks = pool.take(self._count - len(table))
            table += blocks
            return blocks
        new: list[int] = []
        copies = pool.num_free >= self._count
        shared = [pool.ref_counts[block] > 1 for block in found]
        for block, is_shared in zip(found, shared, strict=True):
            if copies or is_shared:
                (own,) = pool.take(1)
                new.append(own)
                table.append(own)
                self._copies.append((block, own))
                self._of_copies.append(block)
            else:
                pool.uncache(block)
                table.append(block)
        return new

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Does nothing: `keep_checkpoint` caches states."""

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        return _NEVER

    # --- checkpoints

    def num_hashes(self, num_tokens: int) -> int:
        """How many hashes of the chain cover `num_tokens` tokens."""
        return num_tokens // self.block_size * self._hashes_per_block

    def keep_checkpoint(self, request: Request, num_tokens: int) -> list[int]:
        """Plans a copy of the request's states after its first `num_tokens` tokens, which its blocks hold until the planned step
        computes on. Returns the checkpoint's blocks; none when it exists already, when too few blocks are free, or when the request
        is distrusted."""
        pool = self._pool
        if request.is_distrusted:
            return []
        block_hash = request.block_hashes[self.num_hashes(num_tokens) - 1]
        if self._lookup(block_hash) is not None or pool.num_free < self._count:
            return []
        blocks = pool.take(self._count)
        for block, name in zip(blocks, self._names(block_hash), strict=True):
            pool.cache(self.index, block, name)
        self._copies += zip(self.tables[request.request_id], blocks, strict=True)
        self._of_copies += blocks
        self._kept.setdefault(request.request_id, []).append((num_tokens, block_hash))
        return blocks

    def copy_states(self, request: Request) -> list[int]:
        """Like `keep_checkpoint`, for a connector only: the copy is not cached, and its blocks are free again when the step is booked,
        unless the connector still reads them. Returns no blocks when too few are free, or when the request is distrusted."""
        pool = self._pool
        if request.is_distrusted or pool.num_free < self._count:
            return []
        blocks = pool.take(self._count)
        self._copies += zip(self.tables[request.request_id], blocks, strict=True)
        self._of_copies += blocks
        return blocks

    def take_copies(self) -> tuple[list[tuple[int, int]], list[int]]:
        copies, self._copies = self._copies, []
        checkpoints, self._of_copies = self._of_copies, []
        self.held += checkpoints
        return copies, checkpoints

    def release(self, checkpoints: Sequence[int]) -> None:
        for block in checkpoints:
            self.held.remove(block)
        self._pool.release(checkpoints)

    def cached_blocks_from(self, request_id: str, num_tokens: int) -> list[int]:
        return [
            block
            for end, block_hash in self._kept.get(request_id, ())
            if end > num_tokens
            for name in self._names(block_hash)
            if (block := self._pool.lookup(self.index, name)) is not None
        ]

    def forget_after(self, request_id: str, num_tokens: int) -> None:
        for block in self.cached_blocks_from(request_id, num_tokens):
            self._pool.uncache(block)

    def forget_named(self, hashes: Iterable[bytes]) -> None:
        super().forget_named(name for block_hash in hashes for name in self._names(block_hash))

    def free(self, request_id: str, spare_after: int | None = None) -> None:
        super().free(request_id)
        self._kept.pop(request_id, None)

    def check_table(self, request: Request) -> None:
        count = len(self.tables[request.request_id])
        if count != self._count:
            raise InternalError(f"{request!r} has {count} of {self._count} blocks of states in group {self.index}")
