"""Which bytes of which rank are meant by a move between two pools, where one or both of them lie in shards: some heads of every block
in memory of each rank's own.

The protocol knows one pool on either side, whose blocks have all heads. Here a move between two such pools becomes moves between their
shards. Each shard that takes gets all its heads, also those that other shards keep as well; a head that several shards could give is
given by one of them, the same one to all that take it and for checksums, because copies of it may differ in rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tandem.kvtransfer.protocol.transport import HeadAxes, Move, Operation, UnitIds, run_bounds
from tandem.wire.errors import InternalError
from tandem.wire.handoff import CacheMemory


class HeadRange(msgspec.Struct, frozen=True):
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


Shards = tuple[HeadRange, ...]
"""The heads of a pool's shards. One that lies in one piece is its only shard."""


def shards_in(memory: CacheMemory, num_heads: int) -> Shards:
    shards = tuple(HeadRange(shard.first_head, shard.num_heads) for shard in memory.shards)
    return shards or (HeadRange(0, num_heads),)


class ShardMove(NamedTuple):
    """A move between shard `ours` of our pool and shard `theirs` of the peer's: its units are of these shards."""

    ours: int
    theirs: int
    move: Move


def givers_of(shards: Sequence[HeadRange]) -> UnitIds:
    """For each head, the shard that gives it. Heads that the same shards keep are shared between these, in order."""
    keepers: list[list[int]] = [[] for _ in range(max(shard.end for shard in shards))]
    for number, shard in enumerate(shards):
        for head in range(shard.first, shard.end):
            keepers[head].append(number)
    givers = np.zeros(len(keepers), dtype=np.int64)
    head = 0
    while head < len(keepers):
        end = head
        while end < len(keepers) and keepers[end] == keepers[head]:
            end += 1
        for place in range(end - head):
            givers[head + place] = keepers[head][place * len(keepers[head]) // (end - head)]
        head = end
    return givers


def pairs_between(ours: Shards, theirs: Shards) -> list[tuple[int, int]]:
    """The shards, ours and theirs, between which anything moves in either direction."""
    given = {(ours_, theirs_) for ours_, theirs_ in _pairs(ours, theirs)}
    taken = {(ours_, theirs_) for theirs_, ours_ in _pairs(theirs, ours)}
    return sorted(given | taken)


def _pairs(giving: Sequence[HeadRange], taking: Sequence[HeadRange]) -> Iterator[tuple[int, int]]:
    givers = givers_of(giving)
    for taker, shard in enumerate(taking):
        for giver in np.unique(givers[shard.first : shard.end]).tolist():
            yield giver, taker


class PoolSplit:
    """Every move between two pools as moves between their shards, of the same bytes. Units that follow one another on both sides become
    larger ones. The thread that posts has bytes to copy: what is the same for each grain is worked out once for all moves."""

    def __init__(self, ours: Shards, theirs: Shards) -> None:
        self._ours, self._theirs = ours, theirs
        # By the operation, the units' size, and a grain's units on both sides: as many as there are counts of layers that go together.
        self._patterns: dict[tuple[Operation, int, bytes, bytes], list[_GrainPattern]] = {}

    def of(self, move: Move) -> list[ShardMove]:
        axes, units = move.heads, move.grain_units
        if axes is None:
            raise InternalError("a move whose units are of several heads")
        ours, theirs = (column[:units] - column[0] for column in (move.local, move.remote))
        key = (move.operation, move.unit_bytes, ours.tobytes(), theirs.tobytes())
        if key not in self._patterns:
            self._patterns[key] = self._patterns_of(move.operation, move.unit_bytes, axes, ours, theirs)
        begins = (
            _Units(move.local[::units], axes.ours // move.unit_bytes, axes.count),
            _Units(move.remote[::units], axes.theirs // move.unit_bytes, axes.count),
        )
        return [
            ShardMove(pattern.ours, pattern.theirs, self._move(move, pattern, *begins))
            for pattern in self._patterns[key]
        ]

    def _patterns_of(
        self, operation: Operation, unit_bytes: int, axes: HeadAxes, local: UnitIds, remote: UnitIds
    ) -> list[_GrainPattern]:
        mine = _Units(local, axes.ours // unit_bytes, axes.count)
        others = _Units(remote, axes.theirs // unit_bytes, axes.count)
        if not np.array_equal(mine.head, others.head) or mine.head[0] != 0:
            raise InternalError("a move from one head to another")
        writes = operation is Operation.WRITE
        giving, taking = (self._ours, self._theirs) if writes else (self._theirs, self._ours)
        givers = givers_of(giving)
        heads = np.arange(axes.count)
        found = []
        for giver, taker in _pairs(giving, taking):
            shard = taking[taker]
            wanted = (givers == giver) & (heads >= shard.first) & (heads < shard.end)
            rows = np.flatnonzero(wanted[mine.head])
            here, there = (giver, taker) if writes else (taker, giver)
            ours = mine.within(self._ours[here])[rows]
            theirs = others.within(self._theirs[there])[rows]
            first, counts = run_bounds(ours, theirs)
            size = int(np.gcd.reduce(np.concatenate([counts, ours[first], theirs[first]])))
            found.append(_GrainPattern(here, there, ours, theirs, size))
        return found

    def _move(self, move: Move, pattern: _GrainPattern, ours: _Units, theirs: _Units) -> Move:
        """In the largest units that make up all runs of a grain and lie at multiples of their size."""
        begins = (
            # A grain begins with head 0, which the shard may not have: the pattern says where its heads are.
            ours.within(HeadRange(0, self._ours[pattern.ours].count)),
            theirs.within(HeadRange(0, self._theirs[pattern.theirs].count)),
        )
        size = int(np.gcd.reduce(np.concatenate(begins), initial=pattern.size))
        local, remote = (
            (begin[:, None] // size + inside[::size] // size).reshape(-1)
            for begin, inside in zip(begins, (pattern.local, pattern.remote), strict=True)
        )
        return Move(move.operation, move.transfer_id, move.unit_bytes * size, local, remote)


class _GrainPattern(NamedTuple):
    """What of each grain moves between shard `ours` and shard `theirs`: units from the grain's beginning on in each, in runs of
    multiples of `size`."""

    ours: int
    theirs: int
    local: UnitIds
    remote: UnitIds
    size: int


class _Units:
    """Units of a pool, each with its head, what lies outside of the heads, and what lies inside of one, where `inner` units lie side by
    side. Each part of a sum of units can be taken alone, because a grain's first unit has the lowest place on every axis."""

    def __init__(self, units: UnitIds, inner: int, num_heads: int) -> None:
        self._inner = inner
        outer, self._inside = np.divmod(units, inner)
        self._outer, self.head = np.divmod(outer, num_heads)

    def within(self, shard: HeadRange) -> UnitIds:
        """As units of a shard, which has fewer heads between the same neighbours."""
        units: UnitIds = (self._outer * shard.count + self.head - shard.first) * self._inner + self._inside
        return units
