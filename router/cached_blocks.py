"""What each node's cache holds, as the nodes tell it (`wire.requests.CacheNews`): block by block, in the device and in tiers.

A node's messages are numbered. One that is missing leaves the node's part unknown until the node has listed everything again. A node
that does not tell, or whose cache would not fit here, is not known either: then the router goes by what it sent there.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from tandem.router.prefixes import Levels, NodeBits
from tandem.wire.kv_events import DEVICE_MEDIUM
from tandem.wire.requests import CacheNews

logger = logging.getLogger(__name__)

# Nodes have a prompt cached up to different lengths. So many lengths are told apart.
MOST_LEVELS = 8


@dataclasses.dataclass(slots=True)
class _NodeCache:
    epoch: int
    bit: int
    next_number: int = 0
    is_known: bool = True  # False: something is missing, or it did not fit
    media: dict[str, set[int]] = dataclasses.field(default_factory=lambda: {DEVICE_MEDIUM: set()})

    @property
    def count(self) -> int:
        return sum(map(len, self.media.values()))


class CachedBlocks:
    """On one thread. A block that a node has in several media counts once for each."""

    def __init__(self, bits: NodeBits, most: int) -> None:
        self._bits = bits
        self._most = most
        self._caches: dict[str, _NodeCache] = {}
        self._nodes_of: dict[int, int] = {}  # hash -> the nodes that have it in any medium
        self.count = 0
        self.gaps = 0  # times that a message was missing

    def knows(self, node_id: str) -> bool:
        cache = self._caches.get(node_id)
        return cache is not None and cache.is_known

    def on_news(self, news: CacheNews) -> bool:
        """False: something is missing, and the node is to list everything again."""
        cache = self._caches.get(news.node_id)
        if news.number == 0:
            self.forget(news.node_id)
            cache = self._caches[news.node_id] = _NodeCache(news.epoch, self._bits.add(news.node_id))
        elif cache is None or cache.epoch != news.epoch or news.number != cache.next_number:
            if cache is not None and cache.epoch == news.epoch and news.number < cache.next_number:
                return True  # it came twice
            if cache is not None and cache.epoch == news.epoch and cache.next_number < 0:
                return True  # it was asked already
            self.gaps += 1
            self._lose(news)
            return False
        cache.next_number += 1
        if not cache.is_known:
            return True
        for change in news.changes:
            hashes = array("Q", change.hashes)
            if sys.byteorder == "big":
                hashes.byteswap()
            there = cache.media.setdefault(change.medium, set())
            if change.is_stored:
                self._store(cache, there, hashes)
            else:
                self._remove(cache, there, hashes)
        if self.count > self._most:
            self._empty(cache)
            logger.warning(
                "node %s: router.limits.cached_blocks has no room for what it has cached, so requests go there by what was sent",
                news.node_id,
            )
        return True

    def _lose(self, news: CacheNews) -> None:
        """Nothing is known of the node until it lists everything."""
        self.forget(news.node_id)
        self._caches[news.node_id] = _NodeCache(news.epoch, 0, next_number=-1, is_known=False)

    def _store(self, cache: _NodeCache, there: set[int], hashes: Sequence[int]) -> None:
        bit, nodes_of = cache.bit, self._nodes_of
        before = len(there)
        for value in hashes:
            there.add(value)
            nodes_of[value] = nodes_of.get(value, 0) | bit
        self.count += len(there) - before

    def _remove(self, cache: _NodeCache, there: set[int], hashes: Sequence[int]) -> None:
        others = [each for each in cache.media.values() if each is not there and each]
        for value in hashes:
            if value not in there:
                continue
            there.remove(value)
            self.count -= 1
            if not any(value in each for each in others):
                self._clear_bit(value, cache.bit)

    def _clear_bit(self, value: int, bit: int) -> None:
        left = self._nodes_of[value] & ~bit
        if left:
            self._nodes_of[value] = left
        else:
            del self._nodes_of[value]

    def _empty(self, cache: _NodeCache) -> None:
        for value in set().union(*cache.media.values()):
            self._clear_bit(value, cache.bit)
        self.count -= cache.count
        cache.media.clear()
        cache.is_known = False

    def forget(self, node_id: str) -> None:
        """It is gone, or will list everything."""
        cache = self._caches.pop(node_id, None)
        if cache is not None:
            self._empty(cache)

    def levels(self, hashes: Sequence[int]) -> Levels:
        """A cache that has a block has those before it too: it evicts the last of them first. So lengths are found by halving."""
        levels: Levels = []
        get, seen, length = self._nodes_of.get, 0, len(hashes)
        while length and len(levels) < MOST_LEVELS:
            # The first block that none of the nodes has that are not seen yet.
            length = bisect_left(hashes, True, 0, length, key=lambda value: not get(value, 0) & ~seen)
            if length:
                nodes = get(hashes[length - 1], 0)
                levels.append((length, nodes & ~seen))
                seen |= nodes
        return levels

    def in_tier(self, node_id: str, hashes: Sequence[int]) -> tuple[int, str]:
        """How many of these blocks the node has to load, and from which medium; (0, "") where none is known to be."""
        cache = self._caches.get(node_id)
        if cache is None or not cache.is_known or len(cache.media) == 1 or not hashes:
            return 0, ""
        on_device = cache.media[DEVICE_MEDIUM]
        medium = next(
            (each for each, there in cache.media.items() if there is not on_device and hashes[-1] in there),
            "",
        )
        # As with lengths: of a prefix, the device gives up the last block first.
        first = bisect_left(hashes, True, key=lambda value: value not in on_device)
        return (len(hashes) - first, medium) if medium and first < len(hashes) else (0, "")
