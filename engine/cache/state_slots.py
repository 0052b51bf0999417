"""Recurrent states: what a layer keeps of all tokens before, in as many bytes for one token as for a thousand.

A request's states fill `blocks_per_request` blocks of the pool, which are taken together when it gets its first slots and given
back together at its end. They hold the states after its last computed token, and no others: nothing of them is found by a later
prompt, and a request that must go back to an earlier token begins again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.cache.group_manager import GroupManager
from tandem.engine.cache.groups import KVCacheGroup
from tandem.engine.cache.pool import BlockPool
from tandem.engine.request import Request
from tandem.wire.errors import ConfigurationError, InternalError

_NEVER = 1 << 62  # tokens


class StateManager(GroupManager):
    def __init__(self, index: int, group: KVCacheGroup, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(index, group, pool, hash_block_size)
        if group.blocks_per_request < 1:
            raise ConfigurationError(
                f"a group of states needs at least 1 block for each request, not {group.blocks_per_request}"
            )
        self._count = group.blocks_per_request

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """All of a request's states are read by its next token."""

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return self._count

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return False

    def num_blocks_needed(self, num_slots: int, hits: Sequence[int], num_computed_tokens: int) -> int:
        return self._count

    def num_blocks_missing(self, request_id: str, num_slots: int) -> int:
        return self._count - len(self.tables[request_id])

    def num_loaded_blocks(self, num_tokens: int) -> int:
        return self._count if num_tokens else 0

    def first_token_of(self, index: int) -> int:
        return 0

    def adopt(self, request_id: str, hits: Sequence[int], num_computed_tokens: int) -> None:
        self.tables[request_id] = []
        self._num_cached[request_id] = 0

    def grow(self, request_id: str, num_slots: int) -> list[int]:
        table = self.tables[request_id]
        blocks = self._pool.take(self._count - len(table))
        table += blocks
        return blocks

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """States are not found again."""

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        return _NEVER

    def check_table(self, request: Request) -> None:
        count = len(self.tables[request.request_id])
        if count != self._count:
            raise InternalError(
                f"{request!r} has {count} of {self._count} blocks of states in group {self.index}"
            )
