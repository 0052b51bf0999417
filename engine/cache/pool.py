"""All blocks of the KV cache: how many block tables use each, its hash, which block to evict next, and the KV events of that.

A block is a number. Its state is kept in columns: how many tables it is in, and the hash of its content when it is full and
cached. The columns are plain memory that the garbage collector does not walk, so a step costs the same with a million blocks
as with a thousand. Block 0 is the null block: it fills the places of a table whose block was dropped, is never counted, and
is never free.

A free block keeps its content and its hash until it is taken for other tokens (lazy eviction); until then a request with
the same prefix can use it again.

The free blocks form a doubly linked list, least recently used first, threaded through two columns indexed by block id. There
are no node objects, so a queue of a million blocks is built in milliseconds. One sentinel closes the list into a ring, so no
operation has an edge case.

`Residency` measures how long cached blocks stay, which tells whether a larger cache, or a tier, would find more. Every
eviction is counted; times are taken only of every n-th block, so a step pays almost nothing for them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from tandem.base.errors import InternalError
from tandem.engine.cache.hashing import ExtraKey, HashedContent, extra_keys
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.kv_events import DEVICE_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class CacheEvents:
    """Records the KV events of a pool. If several blocks hold the same content, the first one cached makes the stored event and
    the last one dropped makes the removed event."""

    def __init__(self, num_groups: int, untold: Collection[int] = ()) -> None:
        """`untold` are groups without events: recurrent states, whose checkpoints lie where attention blocks are cached anyway."""
        self._untold = frozenset(untold)
        self._events: list[KVEvent] = []
        # The hashes of the last event if it is a removal: further removals join it.
        self._removed: list[bytes] | None = None
        self._removed_group = 0
        self._names_groups = num_groups > 1

    def stored(
        self,
        request: HashedContent,
        group: int,
        block_size: int,
        blocks: range,
        hashes: list[bytes],
        parent: bytes | None,
    ) -> None:
        """`blocks` are the indices of neighbouring blocks in the request's table."""
        start, end = blocks.start * block_size, blocks.stop * block_size
        keys = None
        if request.lora is not None or request.cache_salt is not None or request.media:
            keys = [_shown(extra_keys(request, i * block_size, (i + 1) * block_size)) or None for i in blocks]
        self._add(
            BlockStored(
                hashes,
                parent,
                list(request.all_token_ids[start:end]),
                block_size,
                None,
                DEVICE_MEDIUM,
                request.lora,
                keys,
                group if self._names_groups else None,
            )
        )

    def removed(self, group: int, block_hash: bytes) -> None:
        if group in self._untold:
            return
        if self._removed is None or self._removed_group != group:
            hashes: list[bytes] = []
            self._add(BlockRemoved(hashes, DEVICE_MEDIUM, group if self._names_groups else None))
            self._removed, self._removed_group = hashes, group
        if self._removed is not None:
            self._removed.append(block_hash)

    def cleared(self) -> None:
        self._add(AllBlocksCleared())

    def _add(self, event: KVEvent) -> None:
        self._removed = None
        self._events.append(event)

    def take(self) -> Sequence[KVEvent]:
        """Returns the events since the last call."""
        events = self._events
        if not events:
            return ()
        self._events, self._removed = [], None
        return events


def _shown(keys: Sequence[ExtraKey]) -> tuple[str, ...]:
    """Extra keys as text, for events: their kind, value and place in the prompt, separated by colons."""
    return tuple(
        ":".join(part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in key)
        for key in keys
    )


_UNLINKED = -1


class FreeBlockQueue:
    """A queue of blocks in order of eviction. At first it has all blocks `0 .. num_blocks - 1`. Every operation is O(1) per
    block."""

    __slots__ = ("_next", "_prev", "_sentinel", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self._sentinel = num_blocks
        self.num_free = num_blocks
        self._next = array("i", range(1, num_blocks + 2))
        self._next[num_blocks] = 0
        self._prev = array("i", range(-1, num_blocks))
        self._prev[0] = num_blocks

    def pop_front(self, count: int) -> list[int]:
        """Removes and returns the `count` least recently used blocks. It repairs the ring once, at the end."""
        if count > self.num_free:
            raise InternalError(f"{count} blocks were taken from a queue of {self.num_free}")
        following = self._next
        block = following[self._sentinel]
        popped = []
        for _ in range(count):
            popped.append(block)
            after = following[block]
            following[block] = _UNLINKED
            block = after
        following[self._sentinel] = block
        self._prev[block] = self._sentinel
        self.num_free -= count
        return popped

    def remove(self, block: int) -> None:
        """Removes a block from anywhere in the queue."""
        after = self._next[block]
        if after == _UNLINKED:
            raise InternalError(f"block {block} is not in the free queue")
        before = self._prev[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = _UNLINKED
        self.num_free -= 1

    def append(self, blocks: Iterable[int]) -> None:
        """Adds blocks as the most recently used, the last of them as the newest."""
        following, preceding = self._next, self._prev
        last = preceding[self._sentinel]
        count = 0
        for block in blocks:
            following[last] = block
            preceding[block] = last
            last = block
            count += 1
        following[last] = self._sentinel
        preceding[self._sentinel] = last
        self.num_free += count

    def prepend(self, blocks: Iterable[int]) -> None:
        """Adds blocks as the least recently used, the first of them as the next to be taken."""
        following, preceding = self._next, self._prev
        first, before = following[self._sentinel], self._sentinel
        for block in blocks:
            following[before] = block
            preceding[block] = before
            before = block
            self.num_free += 1
        following[before] = first
        preceding[first] = before

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _UNLINKED

    def __iter__(self) -> Iterator[int]:
        """In order of eviction."""
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def check_integrity(self) -> None:
        """Raises an InternalError unless both directions of the ring agree and its length is `num_free`."""
        seen = 0
        before, block = self._sentinel, self._next[self._sentinel]
        while block != self._sentinel:
            if block == _UNLINKED or self._prev[block] != before:
                raise InternalError(f"the free queue is broken between blocks {before} and {block}")
            seen += 1
            if seen > self._sentinel:
                raise InternalError("the free queue has a loop")
            before, block = block, self._next[block]
        if self._prev[self._sentinel] != before or seen != self.num_free:
            raise InternalError(f"the free queue says {self.num_free} blocks and holds {seen}")


TIMED_BLOCKS = 1024  # of a large pool, this many blocks to twice as many are timed


class ResidencyTotals(msgspec.Struct):
    """Counters of evictions and reuses, and the sums of the times of those that were timed."""

    blocks_evicted: int = 0  # cached blocks that were taken for other tokens
    evictions_timed: int = 0  # evictions that the next two sums are over
    evicted_after_seconds: float = 0.0  # from being cached to eviction
    evicted_idle_seconds: float = 0.0  # from the last use to eviction
    reuses_timed: int = 0  # free blocks that a request found in the prefix cache
    reused_after_seconds: float = 0.0  # from their last use until then


class Residency:
    """Measures how long blocks stay cached. The pool calls it only for the blocks that are timed."""

    def __init__(
        self, num_blocks: int, clock: Callable[[], float] = time.monotonic, totals: ResidencyTotals | None = None
    ) -> None:
        """Counts in `totals`."""
        self.every = max(1, num_blocks // TIMED_BLOCKS)  # blocks whose numbers are multiples of it are timed
        self.totals = totals if totals is not None else ResidencyTotals()
        self._clock = clock
        self._cached_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def cached(self, block: int) -> None:
        self._cached_at[block] = self._clock()

    def idle(self, block: int) -> None:
        """The block has left its last table."""
        if block in self._cached_at:
            self._idle_since[block] = self._clock()

    def reused(self, block: int) -> None:
        """The block was in no table, and a request has found it."""
        since = self._idle_since.pop(block, None)
        if since is not None:
            self.totals.reuses_timed += 1
            self.totals.reused_after_seconds += self._clock() - since

    def evicted(self, block: int) -> None:
        cached_at, idle_since = self._cached_at.pop(block, None), self._idle_since.pop(block, None)
        if cached_at is not None and idle_since is not None:
            now = self._clock()
            self.totals.evictions_timed += 1
            self.totals.evicted_after_seconds += now - cached_at
            self.totals.evicted_idle_seconds += now - idle_since

    def forgotten(self, block: int) -> None:
        """The block was uncached without being evicted, for example because its content is wrong."""
        self._cached_at.pop(block, None)
        self._idle_since.pop(block, None)

    def all_forgotten(self) -> None:
        self._cached_at.clear()
        self._idle_since.clear()


CachedBlocks = dict[bytes, int | dict[int, None]]
"""hash -> the block that holds this content, or several blocks in the order in which they were cached. A block table is only
appended to, so a request that computed a copy of a cached block keeps its copy. A look-up finds the block cached first."""


class BlockPool:
    """Owns all blocks. Each block is in exactly one state: null, free, quarantined, or in as many tables as its reference count
    says."""

    def __init__(self, num_blocks: int, num_groups: int = 1, *, caching: bool = True) -> None:
        if num_blocks < 2:
            raise InternalError(f"a pool needs the null block and one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.caching = caching
        self.events: CacheEvents | None = None  # None: no KV events are recorded
        self.free_queue = FreeBlockQueue(num_blocks)
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self.hashes: dict[int, bytes] = {}  # by block, of cached blocks
        # Blocks that are in no table and not free, because a peer may still write to them.
        self.quarantined: set[int] = set()
        self._group_of = array("H", bytes(2 * num_blocks))  # the group that a block's hash is registered in
        self.cached: list[CachedBlocks] = [{} for _ in range(num_groups)]
        self.free_queue.remove(NULL_BLOCK_ID)
        self.residency = Residency(num_blocks)

    @property
    def num_free(self) -> int:
        """How many blocks can be taken, including cached ones that no table uses."""
        return self.free_queue.num_free

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """Takes free blocks for one table each and uncaches them. The caller has checked that `count` are free."""
        blocks = self.free_queue.pop_front(count)
        ref_counts, hashes, timed = self.ref_counts, self.hashes, self.residency.every
        for block in blocks:
            if block in hashes:
                self.residency.totals.blocks_evicted += 1
                if not block % timed:
                    self.residency.evicted(block)
                self.uncache(block)
            ref_counts[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Blocks that were found in the prefix cache join one more table, and cannot be evicted while they are in one."""
        ref_counts, timed = self.ref_counts, self.residency.every
        for block in blocks:
            if block == NULL_BLOCK_ID:
                continue
            if ref_counts[block] == 0:
                self.free_queue.remove(block)
                if not block % timed:
                    self.residency.reused(block)
            ref_counts[block] += 1

    def release(self, blocks: Iterable[int], *, before_others: bool = False) -> None:
        """Blocks leave a table. Those that are in no other table become free; the first of them is evicted first, `before_others` also
        before all that are free already."""
        ref_counts, timed = self.ref_counts, self.residency.every
        freed = []
        for block in blocks:
            if block == NULL_BLOCK_ID:
                continue
            left = ref_counts[block] - 1
            if left < 0:
                raise InternalError(f"block {block} was released more often than it was taken")
            ref_counts[block] = left
            if left == 0:
                freed.append(block)
                if not block % timed:
                    self.residency.idle(block)
        if before_others:
            self.free_queue.prepend(freed)
        else:
            self.free_queue.append(freed)

    def quarantine(self, block: int) -> None:
        """A block leaves its only table without becoming free: no request may use it before `end_quarantine`."""
        if self.ref_counts[block] != 1 or block in self.quarantined or block in self.hashes:
            raise InternalError(f"block {block} cannot be quarantined: it is shared, cached or quarantined")
        self.quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self.quarantined:
                raise InternalError(f"block {block} is not in quarantine")
            self.quarantined.remove(block)
            self.release([block])

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free, and would leave the free queue if they were touched."""
        ref_counts = self.ref_counts
        return sum(1 for block in blocks if block != NULL_BLOCK_ID and ref_counts[block] == 0)

    def cache(self, group: int, block: int, block_hash: bytes) -> bool:
        """Registers a full block under the chained hash of all tokens up to its end. Returns False if another block already holds
        the same content."""
        if block in self.hashes or block == NULL_BLOCK_ID:
            raise InternalError(f"block {block} was cached twice")
        self.hashes[block] = block_hash
        self._group_of[block] = group
        if not block % self.residency.every:
            self.residency.cached(block)
        cached = self.cached[group]
        there = cached.setdefault(block_hash, block)
        if there == block:
            return True
        if isinstance(there, dict):
            there[block] = None
        else:
            cached[block_hash] = {there: None, block: None}
        return False

    def uncache(self, block: int) -> None:
        """Removes the block from the prefix cache, if it is cached."""
        block_hash = self.hashes.pop(block, None)
        if block_hash is None:
            return
        if not block % self.residency.every:
            self.residency.forgotten(block)
        cached = self.cached[self._group_of[block]]
        there = cached[block_hash]
        if isinstance(there, dict):
            del there[block]
            if len(there) == 1:
                cached[block_hash] = next(iter(there))
        else:
            del cached[block_hash]
            if self.events is not None:
                self.events.removed(self._group_of[block], block_hash)

    def uncache_named(self, group: int, block_hash: bytes) -> None:
        """Removes every block with this content from the prefix cache."""
        there = self.cached[group].get(block_hash)
        for block in list(there) if isinstance(there, dict) else () if there is None else (there,):
            self.uncache(block)

    def lookup(self, group: int, block_hash: bytes) -> int | None:
        there = self.cached[group].get(block_hash)
        return next(iter(there)) if isinstance(there, dict) else there

    def lookup_run(self, group: int, block_hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the leading hashes, up to the first one that is not cached."""
        get = self.cached[group].get
        found: list[int] = []
        for block_hash in block_hashes:
            there = get(block_hash)
            if there is None:
                break
            found.append(next(iter(there)) if isinstance(there, dict) else there)
        return found

    @property
    def num_cached(self) -> int:
        """How many blocks are in the prefix cache, used or free."""
        return len(self.hashes)

    def reset(self) -> None:
        """Empties the prefix cache. Used blocks stay in their tables, but no other request finds them."""
        self.hashes.clear()
        self.residency.all_forgotten()
        for cached in self.cached:
            cached.clear()
        if self.events is not None:
            self.events.cleared()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises an InternalError unless each block is in exactly one state, and a hash leads to a block exactly when the block
        has that hash. `tables` are all block tables, and all other lists of blocks in use."""
        self.free_queue.check_integrity()
        owners = [0] * self.num_blocks
        for block in self.quarantined:
            owners[block] = 1
        for table in tables:
            for block in table:
                owners[block] += 1
        if self.ref_counts[NULL_BLOCK_ID] or NULL_BLOCK_ID in self.free_queue or NULL_BLOCK_ID in self.hashes:
            raise InternalError("the null block is counted, free or cached")
        for block in range(1, self.num_blocks):
            if owners[block] != self.ref_counts[block]:
                raise InternalError(f"block {block} is in {owners[block]} tables and counts {self.ref_counts[block]}")
            if (block in self.free_queue) == (owners[block] > 0):
                raise InternalError(f"block {block} is in {owners[block]} tables and free, or in neither")
        found = 0
        for group, cached in enumerate(self.cached):
            for block_hash, there in cached.items():
                if isinstance(there, dict) and len(there) < 2:
                    raise InternalError("one block is filed as several")
                for block in there if isinstance(there, dict) else (there,):
                    found += 1
                    if self.hashes.get(block) != block_hash or self._group_of[block] != group:
                        raise InternalError(f"a hash leads to block {block}, which does not hold it")
        if found != len(self.hashes):
            raise InternalError("a block has a hash that does not lead to it")
