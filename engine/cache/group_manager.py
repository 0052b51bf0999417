"""KV cache groups, and the block tables of one group. A group is the layers that keep the KV of the same tokens, or all layers that
keep a recurrent state.

`GroupManager` has what all kinds of attention share. They differ in which tokens a token reads: all before it, a window, or
its own chunk.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.cache.pool import BlockPool, CacheEvents
from tandem.engine.request import Request
from tandem.kvtransfer.base import NULL_BLOCK_ID


class AttentionKind(enum.StrEnum):
    FULL = "full"  # every token is kept
    SLIDING = "sliding"  # a token reads only the last `window` tokens
    CHUNKED = "chunked"  # a token reads only the tokens since the last multiple of `window`
    STATE = "state"  # a recurrent state of all tokens is kept, and no token


class KVCacheGroup(msgspec.Struct, frozen=True):
    """One group of layers. All groups take blocks from one pool; a group's block holds the KV of its `layers`."""

    kind: AttentionKind
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None  # in tokens, with the one that attends; only with SLIDING and CHUNKED
    blocks_per_request: int = 0  # independent of the request's length; only with STATE

    @property
    def keeps_every_token(self) -> bool:
        return self.kind is AttentionKind.FULL

    def first_read(self, position: Any) -> Any:
        """The position of the first token that the one at `position` reads. `position` is a number or an array. With a sliding
        window the result may be negative."""
        if self.window is None:
            return position * 0
        if self.kind is AttentionKind.CHUNKED:
            return position // self.window * self.window
        return position - self.window + 1


class GroupManager(abc.ABC):
    """The block tables of one group. A table is only appended to: entry i holds the KV of the request's tokens from
    `i * block_size` on. An entry whose block was dropped is the null block."""

    def __init__(self, index: int, group: KVCacheGroup, pool: BlockPool, hash_block_size: int) -> None:
        self.index = index
        self.block_size = group.block_size
        self.tables: dict[str, list[int]] = {}
        self._pool = pool
        # How many leading entries of a request's table need no caching any more: they are cached or were dropped.
        self._num_cached: dict[str, int] = {}
        # A block may span several hashes of the chain. It is registered under the last of them, which covers all before it.
        self._hashes_per_block = group.block_size // hash_block_size

    @abc.abstractmethod
    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Returns the blocks of the longest cached prefix of at most `max_tokens` whose length is a multiple of `alignment`."""

    @abc.abstractmethod
    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """How many leading blocks no token after the first `num_computed_tokens` reads."""

    @abc.abstractmethod
    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Releases the blocks that no later token reads."""

    @abc.abstractmethod
    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` holds at once if a step computes at most `max_new_tokens` of them."""

    @abc.abstractmethod
    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request still has all KV that the token after the first `num_tokens` reads."""

    def num_kept(self, request_id: str) -> int:
        """How many blocks the request has."""
        return len(self.tables.get(request_id, ()))

    def num_kept_of(self, hits: Sequence[int]) -> int:
        """How many of the blocks of a hit are in use already, so that adopting them takes no free block."""
        return len(hits) - hits.count(NULL_BLOCK_ID) - self._pool.num_free_among(hits)

    def num_blocks_needed(self, num_slots: int, hits: Sequence[int], num_computed_tokens: int) -> int:
        """How many blocks `adopt` and then `grow` would take from the free queue."""
        required = -(-num_slots // self.block_size)
        skipped = self.num_skipped_blocks(num_computed_tokens)
        fresh = max(required - max(len(hits), skipped), 0)
        return fresh + self._pool.num_free_among(hits[skipped:])

    def num_blocks_missing(self, request_id: str, num_slots: int) -> int:
        """How many blocks `grow` would take."""
        missing = -(-num_slots // self.block_size) - len(self.tables[request_id])
        return missing if missing > 0 else 0

    def first_token_of(self, index: int) -> int:
        """The first token whose KV is lost with block `index` of a table."""
        return index * self.block_size

    def adopt(self, request_id: str, hits: Sequence[int], num_computed_tokens: int) -> None:
        """Begins a request's table with null blocks for skipped places, then the blocks of the hit."""
        skipped = self.num_skipped_blocks(num_computed_tokens)
        kept = hits[skipped:]
        self._pool.touch(kept)
        self.tables[request_id] = [NULL_BLOCK_ID] * skipped + list(kept)
        self._num_cached[request_id] = max(len(hits), skipped)

    def grow(self, request_id: str, num_slots: int) -> list[int]:
        """Appends blocks until the table covers `num_slots` tokens; returns the new ones."""
        table = self.tables[request_id]
        missing = -(-num_slots // self.block_size) - len(table)
        if missing <= 0:
            return []
        blocks = self._pool.take(missing)
        table += blocks
        return blocks

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Caches the blocks that the first `num_tokens` tokens fill. Drafts are not hashed, so a block with one is not cached before
        the draft is accepted. Nothing of a distrusted request is cached."""
        full = num_tokens // self.block_size
        cached = self._num_cached[request.request_id]
        if full <= cached or request.is_distrusted:
            return
        hashes, per_block = request.block_hashes, self._hashes_per_block
        full = min(full, len(hashes) // per_block)
        if full <= cached:
            return
        table, pool = self.tables[request.request_id], self._pool
        appeared: list[int] = []
        for i in range(cached, full):
            # Several requests may share the block, and one of them may have cached it already.
            if (
                table[i] != NULL_BLOCK_ID
                and table[i] not in pool.hashes
                and pool.cache(self.index, table[i], hashes[(i + 1) * per_block - 1])
            ):
                appeared.append(i)
        self._num_cached[request.request_id] = full
        if pool.events is not None and appeared:
            self._tell_stored(pool.events, request, appeared)

    def _tell_stored(self, events: CacheEvents, request: Request, places: list[int]) -> None:
        """Records one event for each run of neighbouring blocks."""
        hashes, per_block = request.block_hashes, self._hashes_per_block
        first = 0
        for i in range(1, len(places) + 1):
            if i < len(places) and places[i] == places[i - 1] + 1:
                continue
            run = range(places[first], places[i - 1] + 1)
            parent = hashes[run.start * per_block - 1] if run.start else None
            names = hashes[(run.start + 1) * per_block - 1 : run.stop * per_block : per_block]
            events.stored(request, self.index, self.block_size, run, names, parent)
            first = i

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        """Up to this many tokens, the request needs no block allocated, cached or released."""
        allocated = len(self.tables[request_id]) * self.block_size - num_lookahead_tokens
        if not self._pool.caching:
            return allocated
        return min(allocated, (self._num_cached[request_id] + 1) * self.block_size - 1)

    def cached_blocks_from(self, request_id: str, num_tokens: int) -> list[int]:
        """Returns the request's cached blocks that hold tokens after its first `num_tokens`."""
        first, end = num_tokens // self.block_size, self._num_cached.get(request_id, 0)
        return [block for block in self.tables.get(request_id, ())[first:end] if block != NULL_BLOCK_ID]

    def forget_after(self, request_id: str, num_tokens: int) -> None:
        """Uncaches the blocks beyond the first `num_tokens` tokens, the only ones whose KV is right."""
        valid = num_tokens // self.block_size
        if self._num_cached.get(request_id, 0) > valid:
            for block in self.cached_blocks_from(request_id, num_tokens):
                self._pool.uncache(block)
            self._num_cached[request_id] = valid

    def forget_named(self, hashes: Iterable[bytes]) -> None:
        """Uncaches all blocks that are registered under these hashes of the chain, whichever requests computed them."""
        for block_hash in hashes:
            self._pool.uncache_named(self.index, block_hash)

    def quarantine(self, request_id: str, blocks: frozenset[int]) -> None:
        """Cuts the table off before the first of `blocks`. Those in `blocks` go into quarantine; the others that were cut off are
        released."""
        table = self.tables.get(request_id, [])
        first = next((i for i, block in enumerate(table) if block in blocks), None)
        if first is None:
            return
        cut, table[first:] = table[first:], []
        self._num_cached[request_id] = min(self._num_cached[request_id], first)
        for block in cut:
            if block in blocks:
                self._pool.quarantine(block)
        self._pool.release(block for block in reversed(cut) if block not in blocks)

    def check_table(self, request: Request) -> None:
        """Raises an InternalError unless the table covers the computed tokens and every cached block in it has the hash of its
        tokens."""
        table = self.tables[request.request_id]
        if len(table) * self.block_size < request.num_computed_tokens:
            raise InternalError(f"{request!r} has {len(table)} blocks in group {self.index}")
        hashes, per_block = request.block_hashes, self._hashes_per_block
        for i, block in enumerate(table):
            filed = self._pool.hashes.get(block)
            end = (i + 1) * per_block
            if filed is not None and (end > len(hashes) or filed != hashes[end - 1]):
                raise InternalError(f"block {block} of {request!r} is cached under a hash that is not its tokens'")
            if filed is not None and (i + 1) * self.block_size > request.num_computed_tokens:
                raise InternalError(f"block {block} of {request!r} is cached before it is computed")

    def free(self, request_id: str, spare_after: int | None = None) -> None:
        """Releases the last block first: later blocks are part of fewer prefixes, so they may be evicted sooner. Those after `spare_after`
        tokens are evicted before all other free blocks."""
        self._num_cached.pop(request_id, None)
        table = self.tables.pop(request_id, None)
        if table:
            if spare_after is not None:
                kept = spare_after // self.block_size
                self._pool.release(reversed(table[kept:]), before_others=True)
                table = table[:kept]
            self._pool.release(reversed(table))


class FullAttentionManager(GroupManager):
    """Every later token reads every token, so all blocks are kept."""

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searches from the left to the first miss. Beyond it no hash of the chain can match."""
        per_block = self._hashes_per_block
        ends = islice(block_hashes, per_block - 1, max_tokens // self.block_size * per_block, per_block)
        hits = self._pool.lookup_run(self.index, ends)
        surplus = len(hits) * self.block_size % alignment // self.block_size
        return hits[: len(hits) - surplus] if surplus else hits

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Does nothing: full attention reads every block."""

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_resume_at(self, request_id: str, num_tokens: int) -> bool:
        return True


class SlidingWindowManager(GroupManager):
    """A token reads itself and the `window - 1` tokens before it. Earlier blocks are released as the request goes on. A prefix is
    a hit when the window before its end is cached."""

    def __init__(self, index: int, group: KVCacheGroup, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(index, group, pool, hash_block_size)
        if group.window is None or group.window < 1:
            raise ConfigurationError(f"a sliding-window group needs a window of at least 1, not {group.window}")
        self._window = group.window
        self._num_dropped: dict[str, int] = {}  # how many leading entries of a table are null

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searches from the right for a run of cached blocks that covers a window, and fills the places before it with null blocks.
        A run that reaches the first block is a hit of any length."""
        per_block = self._hashes_per_block
        wanted = max(-(-(self._window - 1) // self.block_size), 1)
        limit = min(max_tokens // self.block_size, len(block_hashes) // per_block)
        run: list[int] = []  # the rightmost block first
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

    def free(self, request_id: str, spare_after: int | None = None) -> None:
        super().free(request_id, spare_after)
        self._num_dropped.pop(request_id, None)


class ChunkedManager(SlidingWindowManager):
    """A token reads only tokens of its own chunk of `window` tokens. Blocks before the chunk are released as the request goes on.
    A prefix that ends at a chunk's edge is always a hit, because the next token reads none of it."""

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searches from the right for a prefix whose last chunk is cached up to the prefix's end."""
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
            # The run ends before a block that is not cached. No chunk ends in between, so go on with the run's end.
            end = first + len(run)
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self._window * self._window // self.block_size

    def horizon(self, request_id: str, num_lookahead_tokens: int) -> int:
        next_drop = -(-(self._num_dropped[request_id] + 1) * self.block_size // self._window) * self._window
        return min(super().horizon(request_id, num_lookahead_tokens), next_drop)
