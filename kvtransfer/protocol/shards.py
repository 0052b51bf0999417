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


class ShardedPool(NamedTuple):
    """A pool as the protocol knows it, and the heads of its shards. One that lies in one piece is its only shard."""

    block_bytes: int  # of all heads
    shards: tuple[HeadRange, ...]

    @property
    def num_heads(self) -> int:
        return max(shard.end for shard in self.shards)

    @classmethod
    def of(cls, memory: CacheMemory, num_heads: int) -> ShardedPool:
        shards = [HeadRange(shard.first_head, shard.num_heads) for shard in memory.shards]
        return cls(memory.block_bytes, tuple(shards) or (HeadRange(0, num_heads),))


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


def pairs_between(ours: ShardedPool, theirs: ShardedPool) -> list[tuple[int, int]]:
    """The shards, ours and theirs, between which anything moves in either direction."""
    given = {(ours_, theirs_) for ours_, theirs_ in _pairs(ours.shards, theirs.shards)}
    taken = {(ours_, theirs_) for theirs_, ours_ in _pairs(theirs.shards, ours.shards)}
    return sorted(given | taken)


def _pairs(giving: Sequence[HeadRange], taking: Sequence[HeadRange]) -> Iterator[tuple[int, int]]:
    givers = givers_of(giving)
    for taker, shard in enumerate(taking):
        for giver in np.unique(givers[shard.first : shard.end]).tolist():
            yield giver, taker


def split(move: Move, ours: ShardedPool, theirs: ShardedPool) -> list[ShardMove]:
    """The same bytes as moves between shards. Units that follow one another on both sides become larger ones."""
    axes = move.heads
    if axes is None:
        raise InternalError("a move whose units are of several heads")
    mine = _Units(move.local, move.unit_bytes, ours, axes.count, axes.ours)
    others = _Units(move.remote, move.unit_bytes, theirs, axes.count, axes.theirs)
    if not np.array_equal(mine.head, others.head):
        raise InternalError("a move from one head to another")
    writes = move.operation is Operation.WRITE
    giving, taking = (ours, theirs) if writes else (theirs, ours)
    givers = givers_of(giving.shards)
    found = []
    for giver, taker in _pairs(giving.shards, taking.shards):
        shard = taking.shards[taker]
        wanted = (
            (givers == giver) & (np.arange(axes.count) >= shard.first) & (np.arange(axes.count) < shard.end)
        )
        rows = np.flatnonzero(wanted[mine.head])
        if len(rows):
            here, there = (giver, taker) if writes else (taker, giver)
            part = _joined(
                move,
                mine.within(here, rows),
                others.within(there, rows),
                _part_bytes(ours, here, axes),
                _part_bytes(theirs, there, axes),
            )
            found.append(ShardMove(here, there, part))
    return found


class _Units:
    """The units of one side, each with its head, what lies outside of the heads in its pool, and what lies inside of one."""

    def __init__(
        self, units: UnitIds, unit_bytes: int, pool: ShardedPool, num_heads: int, stride: int
    ) -> None:
        self._pool = pool
        self._inner = stride // unit_bytes  # units of one head, side by side
        outer, inside = np.divmod(units, self._inner)
        self._inside = inside
        self._outer, self.head = np.divmod(outer, num_heads)

    def within(self, number: int, rows: UnitIds) -> UnitIds:
        """As units of a shard, which has fewer heads between the same neighbours."""
        shard = self._pool.shards[number]
        head = self._outer[rows] * shard.count + self.head[rows] - shard.first
        units: UnitIds = head * self._inner + self._inside[rows]
        return units


def _part_bytes(pool: ShardedPool, number: int, axes: HeadAxes) -> int:
    """Of a block in one shard."""
    return pool.block_bytes // axes.count * pool.shards[number].count


def _joined(move: Move, local: UnitIds, remote: UnitIds, our_block: int, their_block: int) -> Move:
    """In the largest units that make up all runs, and no larger than a block of either side."""
    first, counts = run_bounds(local, remote)
    blocks = (our_block // move.unit_bytes, their_block // move.unit_bytes)
    size = int(np.gcd.reduce(np.concatenate([counts, local[first], remote[first], blocks])))
    return Move(
        move.operation,
        move.transfer_id,
        move.unit_bytes * size,
        local[::size] // size,
        remote[::size] // size,
    )
