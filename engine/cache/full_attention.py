"""Full attention: every token is read by all that follow, so every block is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tandem.engine.cache.group_manager import GroupManager


class FullAttentionManager(GroupManager):
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
