"""The block tables of layers that attend, by what a token reads: all before it, a window, or its own chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tandem.engine.cache.group_manager import GroupManager
from tandem.engine.cache.groups import KVCacheGroup
from tandem.engine.cache.pool import BlockPool
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.errors import ConfigurationError


class FullAttentionManager(GroupManager):
    """Every token is read by all that follow, so every block is kept."""

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searches from the left to the first miss. After it the chain of hashes cannot match."""
        per_block = self._hashes_per_block
        ends = islice(block_hashes, per_block - 1, max_tokens // self.block_size * per_block, per_block)
        hits = self._pool.lookup_run(self.index, ends)
        surplus = len(hits) * self.block_size % alignment // self.block_size
        return hits[: len(hits) - surplus] if surplus else hits

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Full attention skips none."""

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return True


class SlidingWindowManager(GroupManager):
    """A token reads itself and the `window - 1` tokens before it. Earlier blocks are freed as the request goes on, and a prefix
    is a hit when the window before its end is cached."""

    def __init__(self, index: int, group: KVCacheGroup, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(index, group, pool, hash_block_size)
        if group.window is None or group.window < 1:
            raise ConfigurationError(
                f"a sliding-window group needs a window of at least 1, not {group.window}"
            )
        self._window = group.window
        self._num_dropped: dict[str, int] = {}  # leading places of a table that are null

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searches from the right to the first run of cached blocks that covers a window; places before the run are null.
        A run that reaches the first block is a hit however short it is."""
        per_block = self._hashes_per_block
        wanted = max(-(-(self._window - 1) // self.block_size), 1)
        limit = min(max_tokens // self.block_size, len(block_hashes) // per_block)
        run: list[int] = []  # rightmost first
        for i in range(limit - 1, -1, -1):
            if not run and (i + 1) * self.block_size % alignment:
                continue
            block = self._pool.lookup(self.index, block_hashes[(i + 1) * per_block - 1])
            if block is None:
                run.clear()
                continue
            run.append(block)
            if len(run) == wanted:
                return [NULL_BLOCK_ID] * i + run[::-1]
        return run[::-1]

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self._window + 1, 0) // self.block_size

    def adopt(self, request_id: str, hits: Sequence[int], num_computed_tokens: int) -> None:
        super().adopt(request_id, hits, num_computed_tokens)
        self._num_dropped[request_id] = self.num_skipped_blocks(num_computed_tokens)

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        table = self.tables.get(request_id)
        if table is None:
            return
        dropped, skipped = self._num_dropped[request_id], self.num_skipped_blocks(num_computed_tokens)
        if skipped <= dropped:
            return
        self._pool.release(reversed(table[dropped:skipped]))
        table[dropped:skipped] = [NULL_BLOCK_ID] * (skipped - dropped)
        self._num_dropped[request_id] = skipped

    def num_kept(self, request_id: str) -> int:
        return super().num_kept(request_id) - self._num_dropped.get(request_id, 0)

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        all_kept = -(-num_tokens // self.block_size)
        at_once = -(-(self._window - 1 + max_new_tokens) // self.block_size) + 1
        return min(all_kept, at_once)

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        next_drop = (self._num_dropped[request_id] + 1) * self.block_size + self._window - 1
        return min(super().horizon(request_id, num_lookahead_tokens), next_drop)

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return self._num_dropped[request_id] <= self.num_skipped_blocks(num_tokens)

    def free(self, request_id: str) -> None:
        super().free(request_id)
        self._num_dropped.pop(request_id, None)


class ChunkedManager(SlidingWindowManager):
    """A token reads those of its own chunk, which ends at each multiple of the chunk's length. Blocks before the chunk are freed
    as the request goes on, and at a chunk's edge a prefix is a hit whatever is cached of it."""

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searches from the right to the first length whose own chunk is cached as far as it goes."""
        per_block = self._hashes_per_block
        end = min(max_tokens // self.block_size, len(block_hashes) // per_block)
        while end > 0:
            length = end * self.block_size
            if length % alignment:
                end -= 1
                continue
            first = self.num_skipped_blocks(length)
            run: list[int] = []
            for i in range(first, end):
                block = self._pool.lookup(self.index, block_hashes[(i + 1) * per_block - 1])
                if block is None:
                    break
                run.append(block)
            if len(run) == end - first:
                return [NULL_BLOCK_ID] * first + run
            # What is found ends there, and no chunk ends in between.
            end = first + len(run)
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self._window * self._window // self.block_size

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        next_drop = -(-(self._num_dropped[request_id] + 1) * self.block_size // self._window) * self._window
        return min(super().horizon(request_id, num_lookahead_tokens), next_drop)
