"""Splits a move between two pools among ranks, if either pool lies in shards: each rank then keeps some heads of
every block, or some heads of some layers, in its own memory.

The protocol knows one pool on either side, whose blocks have all heads and layers. This file turns a move between two
such pools into moves between their shards. A shard that takes gets everything that it keeps, even if other shards keep
it, too. If several shards could give the same heads, one of them gives them to all takers and to checksums, because the
shards' copies may differ in rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tandem.base.errors import InternalError
from tandem.kvtransfer.memory import KVCacheMemory
from tandem.kvtransfer.protocol.processes import this_process
from tandem.kvtransfer.protocol.transport import CutAxis, IndexRange, Move, Operation, ShardPart, UnitIds, run_bounds
from tandem.wire.handoff import CacheMemory, CacheShard

Shards = tuple[ShardPart, ...]
"""The part of a pool that each shard has. A pool in one piece is its only shard."""

_NO_ONE = -1


def part_of(memory: KVCacheMemory) -> ShardPart:
    """Returns the part of the node's pool that this rank has."""
    heads = memory.heads
    slots = memory.layers.of_group if memory.layers is not None else ()
    return ShardPart(
        IndexRange(0, memory.num_kv_heads) if heads is None else IndexRange(heads.first, heads.count),
        tuple(IndexRange(*of_group) for of_group in slots),
    )


def shard_of(memory: KVCacheMemory, described: CacheMemory) -> CacheShard:
    """Describes what this process has of the node's pool. `described`: its memory as if it were a pool of its own."""
    part = part_of(memory)
    return CacheShard(
        first_head=part.heads.first,
        num_heads=part.heads.count,
        agent_metadata=described.agent_metadata,
        memory_type=described.memory_type,
        device_id=described.device_id,
        base_address=described.base_address,
        process=this_process(),
        slots=[(one.first, one.count) for one in part.slots],
    )


def part_in(shard: CacheShard) -> ShardPart:
    return ShardPart(
        IndexRange(shard.first_head, shard.num_heads), tuple(IndexRange(*of_group) for of_group in shard.slots)
    )


def shards_in(memory: CacheMemory, num_heads: int) -> Shards:
    return tuple(map(part_in, memory.shards)) or (ShardPart(IndexRange(0, num_heads)),)


def used_slots(shards: Sequence[ShardPart]) -> tuple[int, ...]:
    """Returns, for shards of pipeline stages, in how many slots, from slot 0 on, a block of each group has layers.
    Returns () for other shards."""
    if not shards[0].slots:
        return ()
    return tuple(
        max(shard.slots[group].end for shard in shards if shard.slots[group].count)
        for group in range(len(shards[0].slots))
    )


class ShardMove(NamedTuple):
    """A move between shard `ours` of our pool and shard `theirs` of the peer's. Its units count within these shards."""

    ours: int
    theirs: int
    move: Move


def givers_of(shards: Sequence[ShardPart], group: int = 0, num_slots: int = 1) -> UnitIds:
    """Returns, for each layer's slot and each head of a group, the shard that gives it: [slots, heads]. If several
    shards keep the same heads, each gives some of them, in order."""
    givers = np.zeros((num_slots, max(shard.heads.end for shard in shards)), dtype=np.int64)
    of_stage: dict[tuple[int, ...], UnitIds] = {}
    for slot in range(num_slots):
        keepers = tuple(
            number
            for number, shard in enumerate(shards)
            if (kept := shard.slots_of(group, num_slots)).first <= slot < kept.end
        )
        if keepers not in of_stage:
            of_stage[keepers] = np.array(keepers)[_givers_of([shards[number].heads for number in keepers])]
        givers[slot] = of_stage[keepers]
    return givers


def _givers_of(shards: Sequence[IndexRange]) -> UnitIds:
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
    """Returns the pairs of shards, ours and theirs, between which anything moves in either direction."""
    found: set[tuple[int, int]] = set()
    for group, num_slots in enumerate(used_slots(ours) or used_slots(theirs) or (1,)):
        found |= {(ours_, theirs_) for ours_, theirs_ in _pairs(ours, theirs, group, num_slots)}
        found |= {(ours_, theirs_) for theirs_, ours_ in _pairs(theirs, ours, group, num_slots)}
    return sorted(found)


def _pairs(
    giving: Sequence[ShardPart], taking: Sequence[ShardPart], group: int, num_slots: int
) -> Iterator[tuple[int, int]]:
    givers = givers_of(giving, group, num_slots)
    for taker, shard in enumerate(taking):
        slots = shard.slots_of(group, num_slots)
        wanted = givers[slots.first : slots.end, shard.heads.first : shard.heads.end]
        for giver in np.unique(wanted).tolist():
            yield giver, taker


class PoolSplit:
    """Splits every move between two pools into moves of the same bytes between their shards. It joins units that follow
    one another on both sides into larger ones. The thread that posts moves also copies bytes, so what is the same for
    each grain is computed once and kept for all moves."""

    def __init__(self, ours: Shards, theirs: Shards) -> None:
        self._ours, self._theirs = ours, theirs
        self._used = used_slots(ours) or used_slots(theirs)
        # Groups whose layers all shards split in the same way are moved as one.
        first: dict[object, int] = {}
        self._alike = [
            first.setdefault(tuple(shard.slots_of(group, used) for shard in (*ours, *theirs)), group)
            for group, used in enumerate(self._used)
        ]
        # By the operation, the units' size, the group, the first layer, and a grain's units on both sides. There are as
        # many patterns as there are numbers of layers that go together.
        self._patterns: dict[tuple[Operation, int, int, int, bytes, bytes], list[_GrainPattern]] = {}

    def of(self, move: Move) -> list[ShardMove]:
        heads, layers = move.heads, move.layers
        if heads is None:
            raise InternalError("a move whose units are of several heads")
        if not self._used:
            return self._of_group(move, 0, 1, [heads], move.local, move.remote)
        if layers is None or move.groups is None:
            raise InternalError("a move between stages whose units are of several layers")
        alike = np.array(self._alike)[move.groups]
        found: list[ShardMove] = []
        for group in np.unique(alike).tolist():
            rows = np.repeat(alike == group, move.grain_units)
            found += self._of_group(
                move, group, self._used[group], [heads, layers], move.local[rows], move.remote[rows]
            )
        return found

    def _of_group(
        self, move: Move, group: int, num_slots: int, axes: Sequence[CutAxis], local: UnitIds, remote: UnitIds
    ) -> list[ShardMove]:
        units, size = move.grain_units, move.unit_bytes
        ours, theirs = (column[:units] - column[0] for column in (local, remote))
        begins = (
            _Units(local[::units], [(axis.count, axis.ours // size) for axis in axes]),
            _Units(remote[::units], [(axis.count, axis.theirs // size) for axis in axes]),
        )
        slot = int(begins[0].index[1][0]) if self._used else 0
        key = (move.operation, size, group, slot, ours.tobytes(), theirs.tobytes())
        if key not in self._patterns:
            split = (
                _Units(ours, [(axis.count, axis.ours // size) for axis in axes]),
                _Units(theirs, [(axis.count, axis.theirs // size) for axis in axes]),
            )
            writes = move.operation is Operation.WRITE
            self._patterns[key] = self._patterns_of(writes, group, num_slots, slot, axes, *split)
        return [
            ShardMove(pattern.ours, pattern.theirs, self._move(move, pattern, slot, *begins))
            for pattern in self._patterns[key]
        ]

    def _patterns_of(
        self,
        writes: bool,
        group: int,
        num_slots: int,
        first_slot: int,
        axes: Sequence[CutAxis],
        mine: _Units,
        others: _Units,
    ) -> list[_GrainPattern]:
        """`first_slot`: the slot of the grain's first unit, from which the units' slots count."""
        head, slot = mine.index[0], mine.index[1] + first_slot if self._used else np.zeros_like(mine.index[0])
        if head[0] != 0 or not all(np.array_equal(*indices) for indices in zip(mine.index, others.index, strict=True)):
            raise InternalError("a move from one head or layer to another")
        giving, taking = (self._ours, self._theirs) if writes else (self._theirs, self._ours)
        givers = givers_of(giving, group, num_slots)
        # A group may have fewer layers than a block has slots.
        given_by = np.where(slot < num_slots, givers[np.minimum(slot, num_slots - 1), head], np.int64(_NO_ONE))
        found = []
        for giver, taker in _pairs(giving, taking, group, num_slots):
            kept, slots = taking[taker].heads, taking[taker].slots_of(group, num_slots)
            wanted = (head >= kept.first) & (head < kept.end) & (slot >= slots.first) & (slot < slots.end)
            rows = np.flatnonzero(wanted & (given_by == giver))
            if not len(rows):  # the move has none of their layers
                continue
            here, there = (giver, taker) if writes else (taker, giver)
            places = []
            counts_of = []
            for part, units in ((self._ours[here], mine), (self._theirs[there], others)):
                firsts, counts = [part.heads.first], [part.heads.count]
                if self._used:
                    firsts.append(part.slots_of(group, num_slots).first - first_slot)
                    counts.append(part.width or axes[1].count)
                places.append(units.within(firsts, counts)[rows])
                counts_of.append(counts)
            first, lengths = run_bounds(*places)
            size = int(np.gcd.reduce(np.concatenate([lengths, *(column[first] for column in places)])))
            found.append(_GrainPattern(here, there, places[0], places[1], size, counts_of[0], counts_of[1]))
        return found

    def _move(self, move: Move, pattern: _GrainPattern, slot: int, ours: _Units, theirs: _Units) -> Move:
        """Returns the move in the largest units that make up all runs of a grain and lie at multiples of their size."""
        # A grain begins with head 0 and the move's first layer. The shard may lack both: the pattern has its own
        # places.
        firsts = [0, slot][: len(ours.index)]
        begins = (ours.within(firsts, pattern.our_counts), theirs.within(firsts, pattern.their_counts))
        size = int(np.gcd.reduce(np.concatenate(begins), initial=pattern.size))
        local, remote = (
            (begin[:, None] // size + inside[::size] // size).reshape(-1)
            for begin, inside in zip(begins, (pattern.local, pattern.remote), strict=True)
        )
        return Move(move.operation, move.transfer_id, move.unit_bytes * size, local, remote)


class _GrainPattern(NamedTuple):
    """What of each grain moves between shard `ours` and shard `theirs`. `local` and `remote` are units in each
    shard, from the grain's beginning on, in runs of multiples of `size`. The counts are how many heads, and slots, a
    block has in either shard."""

    ours: int
    theirs: int
    local: UnitIds
    remote: UnitIds
    size: int
    our_counts: Sequence[int]
    their_counts: Sequence[int]


class _Units:
    """Units of a pool, taken apart: the place of each on each axis that is cut, and what lies between these axes. A
    grain's first unit has the lowest place on every axis, so the parts of two added units can be added one by one."""

    def __init__(self, units: UnitIds, axes: Sequence[tuple[int, int]]) -> None:
        """`axes`: how many places each has, and how many units lie from one place to the next."""
        self.index: list[UnitIds] = [units] * len(axes)
        self._levels: list[tuple[int, int, UnitIds]] = []  # the innermost axis first
        rest, inside = units, 1
        # If two axes have the same step, the inner one has one place.
        for axis in sorted(range(len(axes)), key=lambda number: (axes[number][1], axes[number][0])):
            count, step = axes[axis]
            rest, between = np.divmod(rest, step // inside)
            rest, self.index[axis] = np.divmod(rest, count)
            self._levels.append((axis, step // inside, between))
            inside = step * count
        self._outer = rest

    def within(self, firsts: Sequence[int], counts: Sequence[int]) -> UnitIds:
        """Returns the units as those of a shard, which has `counts` places on each axis, from `firsts` on, and the same
        bytes between the axes."""
        units = self._outer
        for axis, step, between in reversed(self._levels):
            units = (units * counts[axis] + self.index[axis] - firsts[axis]) * step + between
        return units
