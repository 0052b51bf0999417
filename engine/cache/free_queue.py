"""The blocks that no table uses, least recently used first.

A doubly linked list threaded through two columns that are indexed by block id: no node objects, so a queue
of a million blocks is built in milliseconds and the garbage collector never walks it. One sentinel closes the
list into a ring, so that no operation has an edge case.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from tandem.wire.errors import InternalError

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
