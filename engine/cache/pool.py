"""All blocks of the KV cache: how many tables use each, what it holds, which to evict next, and what routers are told of that.

A block is a number. Its state stands in columns: how many tables it is in, and the hash of its content when it is full
and cached. The columns are plain memory that the garbage collector does not walk, so a step costs the same with a million
blocks as with a thousand. Block 0 is the null block: it fills the places of a table where nothing is kept, is in no count,
and is never free.

A free block keeps its content and its hash until it is taken for other tokens (lazy eviction); until then a request with
the same prefix can use it again.

The blocks that no table uses are a doubly linked list, least recently used first, threaded through two columns that are indexed by block
id: no node objects, so a queue of a million blocks is built in milliseconds. One sentinel closes the list into a ring, so that no operation
has an edge case.

How long what is cached stays says whether a larger cache, or a tier beyond it, would find more. Evictions are counted one by one; times are
taken of a share of the blocks, chosen by their numbers, so a step pays for next to none of them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from tandem.engine.cache.hashing import ExtraKey, HashedContent, extra_keys
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.errors import InternalError
from tandem.wire.kv_events import DEVICE_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class CacheEvents:
    """What a pool begins to cache and what it drops. With several copies of a block it tells of the first, and of the last one's end."""

    def __init__(self, num_groups: int, untold: Collection[int] = ()) -> None:
        """`untold`: groups of recurrent states. Their checkpoints are few, and are where blocks of tokens are, which are told of."""
        self._untold = frozenset(untold)
        self._events: list[KVEvent] = []
        self._removed: list[bytes] | None = None  # of the last event, while removals follow one another
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
        """`blocks`: their places among the request's."""
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
        """What happened since the last call."""
        events = self._events
        if not events:
            return ()
        self._events, self._removed = [], None
        return events


def _shown(keys: Sequence[ExtraKey]) -> tuple[str, ...]:
    """As text: what kind, what, and where in the prompt."""
    return tuple(
        ":".join(part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in key)
        for key in keys
    )


_UNLINKED = -1


class FreeBlockQueue:
    """Blocks `0 .. num_blocks - 1`, all of them free at first. Every operation is O(1) per block."""

    __slots__ = ("_next", "_prev", "_sentinel", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self._sentinel = num_blocks
        self.num_free = num_blocks
        self._next = array("i", range(1, num_blocks + 2))
        self._next[num_blocks] = 0
        self._prev = array("i", range(-1, num_blocks))
        self._prev[0] = num_blocks

    def pop_front(self, count: int) -> list[int]:
        """The `count` least recently used blocks; the ring is closed again once, at the end."""
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
        """Takes a block out of the middle."""
        after = self._next[block]
        if after == _UNLINKED:
            raise InternalError(f"block {block} is not in the free queue")
        before = self._prev[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = _UNLINKED
        self.num_free -= 1

    def append(self, blocks: Iterable[int]) -> None:
        """Blocks become the most recently used, the last of them the most."""
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

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _UNLINKED

    def __iter__(self) -> Iterator[int]:
        """In order of eviction."""
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def check_integrity(self) -> None:
        """The ring is whole, read in both directions, and as long as it says."""
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


TIMED_BLOCKS = 1024  # at most twice as many


class ResidencyTotals(msgspec.Struct):
    blocks_evicted: int = 0  # cached blocks that were taken for other tokens
    evictions_timed: int = 0  # of these, those of which the next two are the sums
    evicted_after_seconds: float = 0.0  # since they were cached
    evicted_idle_seconds: float = 0.0  # since a request last had them
    reuses_timed: int = 0  # blocks that no request had, and that one found
    reused_after_seconds: float = 0.0  # since a request last had them


class Residency:
    def __init__(
        self,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        totals: ResidencyTotals | None = None,
    ) -> None:
        """`totals`: where it counts."""
        self.every = max(1, num_blocks // TIMED_BLOCKS)  # blocks whose number it divides are timed
        self.totals = totals if totals is not None else ResidencyTotals()
        self._clock = clock
        self._cached_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def cached(self, block: int) -> None:
        self._cached_at[block] = self._clock()

    def idle(self, block: int) -> None:
        """It is in no table any more."""
        if block in self._cached_at:
            self._idle_since[block] = self._clock()

    def reused(self, block: int) -> None:
        """It was in no table, and is in one again."""
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
        """It is not cached any more, and not for want of room."""
        self._cached_at.pop(block, None)
        self._idle_since.pop(block, None)

    def all_forgotten(self) -> None:
        self._cached_at.clear()
        self._idle_since.clear()


CachedBlocks = dict[bytes, int | dict[int, None]]
"""hash -> the block that holds it, or several: block tables only grow, so a block that turns out to be a copy
of another stays where it is. The first that was cached is the one that is found."""


class BlockPool:
    def __init__(self, num_blocks: int, num_groups: int = 1, *, caching: bool = True) -> None:
        if num_blocks < 2:
            raise InternalError(f"a pool needs the null block and one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.caching = caching
        self.events: CacheEvents | None = None  # None: nothing wants to hear what is cached
        self.free_queue = FreeBlockQueue(num_blocks)
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self.hashes: dict[int, bytes] = {}  # of blocks that can be found
        # In no table, and not free: a peer may still write to them.
        self.quarantined: set[int] = set()
        self._group_of = array("H", bytes(2 * num_blocks))  # where that hash is registered
        self._cached: list[CachedBlocks] = [{} for _ in range(num_groups)]
        self.free_queue.remove(NULL_BLOCK_ID)
        self.residency = Residency(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return self.free_queue.num_free

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """Blocks for one table each; what they held is forgotten."""
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
        """Blocks that were found join one more table; they can't be evicted while they are in any."""
        ref_counts, timed = self.ref_counts, self.residency.every
        for block in blocks:
            if block == NULL_BLOCK_ID:
                continue
            if ref_counts[block] == 0:
                self.free_queue.remove(block)
                if not block % timed:
                    self.residency.reused(block)
            ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Blocks leave a table. Those that are in no other become free, in this order: first in, first evicted."""
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
        self.free_queue.append(freed)

    def quarantine(self, block: int) -> None:
        """A block leaves its one table and is not free: nothing may use it before it is let go."""
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
        """How many of these would leave the free queue if they were touched."""
        ref_counts = self.ref_counts
        return sum(1 for block in blocks if block != NULL_BLOCK_ID and ref_counts[block] == 0)

    def cache(self, group: int, block: int, block_hash: bytes) -> bool:
        """`block` is full, and `block_hash` names all the tokens up to its end. False: there is another copy of it."""
        if block in self.hashes or block == NULL_BLOCK_ID:
            raise InternalError(f"block {block} was cached twice")
        self.hashes[block] = block_hash
        self._group_of[block] = group
        if not block % self.residency.every:
            self.residency.cached(block)
        cached = self._cached[group]
        there = cached.setdefault(block_hash, block)
        if there == block:
            return True
        if isinstance(there, dict):
            there[block] = None
        else:
            cached[block_hash] = {there: None, block: None}
        return False

    def uncache(self, block: int) -> None:
        """Removes the block from the prefix cache, if it is there."""
        block_hash = self.hashes.pop(block, None)
        if block_hash is None:
            return
        if not block % self.residency.every:
            self.residency.forgotten(block)
        cached = self._cached[self._group_of[block]]
        there = cached[block_hash]
        if isinstance(there, dict):
            del there[block]
            if len(there) == 1:
                cached[block_hash] = next(iter(there))
        else:
            del cached[block_hash]
            if self.events is not None:
                self.events.removed(self._group_of[block], block_hash)

    def lookup(self, group: int, block_hash: bytes) -> int | None:
        there = self._cached[group].get(block_hash)
        return next(iter(there)) if isinstance(there, dict) else there

    def lookup_run(self, group: int, block_hashes: Iterable[bytes]) -> list[int]:
        """Blocks for the hashes up to the first that is not cached."""
        get = self._cached[group].get
        found: list[int] = []
        for block_hash in block_hashes:
            there = get(block_hash)
            if there is None:
                break
            found.append(next(iter(there)) if isinstance(there, dict) else there)
        return found

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, in use or free."""
        return len(self.hashes)

    def reset(self) -> None:
        """Empties the prefix cache. Blocks in use stay in their tables, and are found by no other request."""
        self.hashes.clear()
        self.residency.all_forgotten()
        for cached in self._cached:
            cached.clear()
        if self.events is not None:
            self.events.cleared()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables` are all there are. Each block is in exactly one place: null, free, in quarantine, or in as many
        tables as its count says; and a hash leads to a block exactly when the block has that hash."""
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
                raise InternalError(
                    f"block {block} is in {owners[block]} tables and counts {self.ref_counts[block]}"
                )
            if (block in self.free_queue) == (owners[block] > 0):
                raise InternalError(f"block {block} is in {owners[block]} tables and free, or in neither")
        found = 0
        for group, cached in enumerate(self._cached):
            for block_hash, there in cached.items():
                if isinstance(there, dict) and len(there) < 2:
                    raise InternalError("one block is filed as several")
                for block in there if isinstance(there, dict) else (there,):
                    found += 1
                    if self.hashes.get(block) != block_hash or self._group_of[block] != group:
                        raise InternalError(f"a hash leads to block {block}, which does not hold it")
        if found != len(self.hashes):
            raise InternalError("a block has a hash that does not lead to it")
