"""Chunked attention: a token reads those of its own chunk, which ends at each multiple of the chunk's length. Blocks before the chunk
are freed as the request goes on, and at a chunk's edge a prefix is a hit whatever is cached of it."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.cache.sliding_window import SlidingWindowManager
from tandem.kvtransfer.base import NULL_BLOCK_ID


class ChunkedManager(SlidingWindowManager):
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
