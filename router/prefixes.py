"""Which nodes have a prompt's first blocks cached, by their own reports and by the router's record of what it
sent.

Used for routing only: a node decides by its own hashes what it has. A set of nodes is a number with one bit
for each (`NodeBits`), so finding the nodes that have a prefix takes no longer for a thousand nodes than for
ten.

A node reports each block of its device and its tiers (`wire.requests.CacheNews`) in numbered messages. After
a missing message nothing is known of the node until it has listed everything again. For such a node, for one
that reports nothing, and for one whose cache would not fit here, the router goes by what it sent there, which
is a guess.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import or_

from tandem.wire.block_hashes import block_hashes, hashes_with_media, root_hash
from tandem.wire.images import MediaFeature
from tandem.wire.kv_events import DEVICE_MEDIUM
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import CacheNews

logger = logging.getLogger(__name__)


DEFAULT_BLOCKS = 4096


class PromptHashes:
    """One prompt's block hashes by block size, each computed once."""

    def __init__(
        self, token_ids: Sequence[int], salt: str | None, lora: str | None = None, media: Sequence[MediaFeature] = ()
    ) -> None:
        self._token_ids = token_ids
        self._media = media
        self._root = root_hash(salt, lora)
        self._by_size: dict[int, list[int]] = {}

    def of(self, block_size: int) -> list[int]:
        hashes = self._by_size.get(block_size)
        if hashes is None:
            if self._media:
                hashes = hashes_with_media(self._token_ids, block_size, self._root, self._media)
            else:
                hashes = block_hashes(self._token_ids, block_size, self._root)
            self._by_size[block_size] = hashes
        return hashes

    def with_output(self, block_size: int, output: Sequence[int]) -> list[int]:
        """Returns the hashes of the prompt and its answer."""
        if self._media:
            return hashes_with_media([*self._token_ids, *output], block_size, self._root, self._media)
        known = self.of(block_size)
        rest = [*self._token_ids[len(known) * block_size :], *output]
        return known + block_hashes(rest, block_size, known[-1] if known else self._root)


class NodeBits:
    """A bit for each node. A node that leaves gives its bit to the next one that joins."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._names: list[str | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._bits)

    def of(self, node_id: str) -> int:
        """The node's bit; 0 for a node without one."""
        return self._bits.get(node_id, 0)

    def add(self, node_id: str) -> int:
        bit = self._bits.get(node_id)
        if bit is None:
            if self._free:
                place = self._free.pop()
                self._names[place] = node_id
            else:
                place = len(self._names)
                self._names.append(node_id)
            bit = self._bits[node_id] = 1 << place
        return bit

    def forget(self, node_id: str) -> None:
        """Frees the node's bit. The caller has removed it from all sets."""
        bit = self._bits.pop(node_id, 0)
        if bit:
            place = bit.bit_length() - 1
            self._names[place] = None
            self._free.append(place)

    def among(self, names: Iterable[str], nodes: int) -> Iterator[str]:
        get = self._bits.get
        return (name for name in names if get(name, 0) & nodes)

    def names(self, nodes: int, most: int, turn: int = 0) -> Iterator[str]:
        """Yields up to `most` names of a set; from a larger set, different ones with each `turn`."""
        if nodes.bit_count() > most:
            later = nodes >> (turn % nodes.bit_length())
            nodes = later << (turn % nodes.bit_length()) or nodes
        for _ in range(most):
            if not nodes:
                return
            place = (nodes & -nodes).bit_length() - 1
            nodes &= nodes - 1
            name = self._names[place]
            if name is not None:
                yield name


Levels = list[tuple[int, int]]
"""Pairs of a number of leading blocks and the set of nodes that have exactly these. The longest comes
first."""


def marked_places(blocks: int) -> list[int]:
    """Every block up to the 16th, then eight per doubling, up to so many blocks."""
    places, step = list(range(1, 17)), 2
    while places[-1] < blocks:
        places += range(places[-1] + step, 2 * places[-1] + 1, step)
        step *= 2
    return places


MARKED_PLACES = marked_places(1 << 20)


@dataclasses.dataclass(slots=True)
class _NodeMarks:
    """The marks of prompts that were sent to one node."""

    bit: int
    capacity: int = DEFAULT_BLOCKS
    held: int = 0  # blocks that all its marks stand for
    # by hash: the blocks that a mark stands for; the least recently used first
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)


def _add_nodes(nodes_of: dict[int, int], hashes: Sequence[int], bits: int) -> None:
    """Adds nodes to each hash's set. New hashes share one number object, because a number for a thousand
    nodes takes 150 bytes."""
    get = nodes_of.get
    for value in hashes:
        nodes = get(value)
        nodes_of[value] = bits if nodes is None else nodes | bits


def _remove_node(nodes_of: dict[int, int], hashes: Iterable[int], bit: int) -> None:
    for value in hashes:
        left = nodes_of[value] & ~bit
        if left:
            nodes_of[value] = left
        else:
            del nodes_of[value]


class PrefixRecord:
    """The prompts that were sent to each node. Only blocks at marked places are noted, so a found length is
    at most an eighth too short, and a prompt of a hundred thousand tokens costs little more than one of a
    thousand.

    A node's record holds no more blocks than the node has. It forgets the least recently used first and,
    within a prompt, the last block first, as the node's cache does.
    """

    def __init__(self, bits: NodeBits | None = None, marked: Sequence[int] = MARKED_PLACES) -> None:
        self.bits = bits if bits is not None else NodeBits()
        self._marked = marked
        # The number of blocks since the mark before, which this mark stands for.
        self._weights = [place - before for place, before in zip(marked, (0, *marked), strict=False)]
        self._nodes_of: dict[int, int] = {}  # by hash: the nodes that it was sent to
        self._marks: dict[str, _NodeMarks] = {}  # by node

    def set_capacity(self, node_id: str, blocks: int) -> None:
        if blocks > 0:
            self._marks_at(node_id).capacity = blocks

    def _marks_at(self, node_id: str) -> _NodeMarks:
        marks = self._marks.get(node_id)
        if marks is None:
            marks = self._marks[node_id] = _NodeMarks(self.bits.add(node_id))
        return marks

    def marks_of(self, hashes: Sequence[int]) -> list[int]:
        return [hashes[place - 1] for place in self._marked[: bisect_right(self._marked, len(hashes))]]

    def sent(self, node_id: str, hashes: Sequence[int]) -> None:
        self.note([node_id], self.marks_of(hashes))

    def note(self, node_ids: Iterable[str], values: Sequence[int]) -> None:
        """Records that a prompt with these hashes at marked places was sent to these nodes."""
        nodes, weights = [self._marks_at(node_id) for node_id in node_ids], self._weights[: len(values)]
        _add_nodes(self._nodes_of, values, reduce(or_, (marks.bit for marks in nodes), 0))
        for marks in nodes:
            blocks = marks.blocks
            marks.held += sum(weights) - sum(map(blocks.pop, values, repeat(0)))
            # In reverse, so that a prompt's last block is forgotten first.
            blocks.update(zip(reversed(values), reversed(weights), strict=True))
            if marks.held > marks.capacity:
                self._forget_longest_unused(marks)

    def _forget_longest_unused(self, marks: _NodeMarks) -> None:
        # In one pass: a new iteration would have to skip all entries that were deleted at the front.
        forgotten = []
        for value, blocks in marks.blocks.items():
            forgotten.append(value)
            marks.held -= blocks
            if marks.held <= marks.capacity:
                break
        for value in forgotten:
            del marks.blocks[value]
        _remove_node(self._nodes_of, forgotten, marks.bit)

    def evicted(self, node_id: str, hashes: Iterable[int]) -> None:
        """The node reports that it has evicted these blocks."""
        marks = self._marks.get(node_id)
        if marks is None or not marks.blocks:
            return
        gone = marks.blocks.keys() & hashes
        marks.held -= sum(map(marks.blocks.pop, gone))
        _remove_node(self._nodes_of, gone, marks.bit)

    def levels(self, hashes: Sequence[int]) -> Levels:
        """Returns the nodes by how many leading blocks they have. If no node has a block, none has the blocks
        after it."""
        get, known = self._nodes_of.get, []
        for place in self._marked[: bisect_right(self._marked, len(hashes))]:
            nodes = get(hashes[place - 1])
            if nodes is None:
                break
            known.append((place, nodes))
        levels, seen = [], 0
        for place, nodes in reversed(known):
            if new := nodes & ~seen:
                levels.append((place, new))
                seen |= new
        return levels

    def emptied(self, node_id: str) -> None:
        """The node has emptied its cache and goes on."""
        marks = self._marks.get(node_id)
        if marks is None:
            return
        _remove_node(self._nodes_of, marks.blocks, marks.bit)
        marks.blocks.clear()
        marks.held = 0

    def forget(self, node_id: str) -> None:
        self.emptied(node_id)
        self._marks.pop(node_id, None)
        self.bits.forget(node_id)


class Overlaps:
    """How much of one prompt each node has cached, or likely has."""

    def __init__(self, bits: NodeBits, levels: Mapping[int, Sequence[Levels]]) -> None:
        """`levels`: by block size, one entry from each source of knowledge."""
        self._bits = bits
        self._levels = levels
        self.holders = 0  # the set of nodes that have any of it
        for known in levels.values():
            for each in known:
                for _, nodes in each:
                    self.holders |= nodes

    def has(self, node_id: str) -> bool:
        return self._bits.of(node_id) & self.holders != 0

    def tokens(self, node: NodeInfo) -> int:
        bit, most = self._bits.of(node.node_id), 0
        if bit:
            for levels in self._levels.get(node.block_size, ()):
                for blocks, nodes in levels:
                    if nodes & bit:
                        most = max(most, blocks)
                        break
        return most * node.block_size

    def tokens_of(self, nodes: Iterable[NodeInfo]) -> dict[str, int]:
        """Tokens by node id, only for nodes that have any."""
        if not self.holders:
            return {}
        return {node.node_id: tokens for node in nodes if self.has(node.node_id) and (tokens := self.tokens(node))}

    def longest(self) -> Iterator[int]:
        """Sets of nodes, those with the longest prefix first."""
        found = [
            (blocks * size, nodes)
            for size, known in self._levels.items()
            for levels in known
            for blocks, nodes in levels
        ]
        found.sort(reverse=True)
        return (nodes for _, nodes in found)

    def among(self, names: Iterable[str], nodes: int) -> Iterator[str]:
        """Yields those of `names` that are in the set."""
        return self._bits.among(names, nodes)

    def names(self, nodes: int, most: int, turn: int) -> Iterator[str]:
        return self._bits.names(nodes, most, turn)


# Nodes have a prompt cached up to different lengths. At most so many lengths are told apart.
MOST_LEVELS = 8


@dataclasses.dataclass(slots=True)
class _NodeCache:
    epoch: int
    bit: int
    next_number: int = 0
    is_known: bool = True  # False when a message is missing, or the cache did not fit here
    media: dict[str, set[int]] = dataclasses.field(default_factory=lambda: {DEVICE_MEDIUM: set()})

    @property
    def count(self) -> int:
        return sum(map(len, self.media.values()))


class CachedBlocks:
    """The blocks that nodes report as cached, for one thread. A block counts once for each medium that a node
    has it in."""

    def __init__(self, bits: NodeBits, most: int) -> None:
        self._bits = bits
        self._most = most
        self._caches: dict[str, _NodeCache] = {}
        self._nodes_of: dict[int, int] = {}  # by hash: the nodes that have it in any medium
        self.count = 0
        self.gaps = 0  # how often a message was missing

    def knows(self, node_id: str) -> bool:
        cache = self._caches.get(node_id)
        return cache is not None and cache.is_known

    def on_news(self, news: CacheNews) -> bool:
        """Takes a node's cache news. Returns False when a message is missing; the caller then asks for the
        whole list."""
        cache = self._caches.get(news.node_id)
        if news.number == 0:
            self.forget(news.node_id)
            cache = self._caches[news.node_id] = _NodeCache(news.epoch, self._bits.add(news.node_id))
        elif cache is None or cache.epoch != news.epoch or news.number != cache.next_number:
            if cache is not None and cache.epoch == news.epoch and news.number < cache.next_number:
                return True  # a duplicate
            if cache is not None and cache.epoch == news.epoch and cache.next_number < 0:
                return True  # the node was asked for its list already
            self.gaps += 1
            self._lose(news)
            return False
        cache.next_number += 1
        if not cache.is_known:
            return True
        for change in news.changes:
            packed = array("Q", change.hashes)
            if sys.byteorder == "big":
                packed.byteswap()
            hashes = packed.tolist()
            there = cache.media.setdefault(change.medium, set())
            if change.is_stored:
                self._store(cache, there, hashes)
            else:
                self._remove(cache, there, hashes)
        if self.count > self._most:
            self._empty(cache)
            logger.warning(
                "node %s: a router knows of %d cached blocks, and this node's are too many: requests go there by what was sent before",
                news.node_id,
                self._most,
            )
        return True

    def _lose(self, news: CacheNews) -> None:
        """Forgets the node's blocks until it has listed everything."""
        self.forget(news.node_id)
        self._caches[news.node_id] = _NodeCache(news.epoch, 0, next_number=-1, is_known=False)

    def _store(self, cache: _NodeCache, there: set[int], hashes: Sequence[int]) -> None:
        before = len(there)
        there.update(hashes)
        _add_nodes(self._nodes_of, hashes, cache.bit)
        self.count += len(there) - before

    def _remove(self, cache: _NodeCache, there: set[int], hashes: Sequence[int]) -> None:
        others = [each for each in cache.media.values() if each is not there and each]
        gone = there.intersection(hashes)
        there -= gone
        self.count -= len(gone)
        _remove_node(self._nodes_of, gone.difference(*others), cache.bit)

    def _empty(self, cache: _NodeCache) -> None:
        _remove_node(self._nodes_of, set().union(*cache.media.values()), cache.bit)
        self.count -= cache.count
        cache.media.clear()
        cache.is_known = False

    def forget(self, node_id: str) -> None:
        """Forgets the node's blocks because it is gone or will list everything."""
        cache = self._caches.pop(node_id, None)
        if cache is not None:
            self._empty(cache)

    def levels(self, hashes: Sequence[int]) -> Levels:
        """Returns the nodes by how many leading blocks they have. A cache evicts a prefix's last block first,
        so a node that has a block has all blocks before it, and lengths are found by halving."""
        levels: Levels = []
        if not self._nodes_of:
            return levels
        get, seen, length = self._nodes_of.get, 0, len(hashes)
        while length and len(levels) < MOST_LEVELS:
            # The first block that no node has, the nodes already seen left out.
            length = bisect_left(hashes, True, 0, length, key=lambda value: not get(value, 0) & ~seen)
            if length:
                nodes = get(hashes[length - 1], 0)
                levels.append((length, nodes & ~seen))
                seen |= nodes
        return levels

    def in_tier(self, node_id: str, hashes: Sequence[int]) -> tuple[int, str]:
        """How many of these blocks the node would have to load, and from which medium; (0, "") when none is
        known to be in one."""
        cache = self._caches.get(node_id)
        if cache is None or not cache.is_known or len(cache.media) == 1 or not hashes:
            return 0, ""
        on_device = cache.media[DEVICE_MEDIUM]
        medium = next(
            (each for each, there in cache.media.items() if there is not on_device and hashes[-1] in there), ""
        )
        # Found by halving, too: the device evicts a prefix's last block first.
        first = bisect_left(hashes, True, key=lambda value: value not in on_device)
        return (len(hashes) - first, medium) if medium and first < len(hashes) else (0, "")
