"""Moves between pools in shards, beside a plain copy head by head and token by token."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from tandem.engine.model.wide.shard import heads_of_rank
from tandem.kvtransfer.protocol.cache_map import AXES, BlockLayout, GrainPlace, Mapping
from tandem.kvtransfer.protocol.shards import HeadRange, PoolSplit, givers_of, pairs_between
from tandem.kvtransfer.protocol.transport import Move, Operation
from tandem.wire.errors import InternalError

BLOCKS = 6
Array = npt.NDArray[np.uint16]


class Pool:
    """`whole` is what a node of one rank has. Each shard is memory of its own with some of its heads."""

    def __init__(self, axes: list[str], sizes: dict[str, int], shards: list[HeadRange], filled: bool) -> None:
        self.axes = axes
        self.shards = tuple(shards)
        self.layout = BlockLayout(tuple(axes), sizes, 2)
        shape = (BLOCKS, *(sizes[axis] for axis in axes))
        values = np.arange(np.prod(shape)) if filled else np.zeros(int(np.prod(shape)))
        self.whole: Array = values.astype(np.uint16).reshape(shape)
        head = 1 + axes.index("head")
        self.parts: list[Array] = [
            np.ascontiguousarray(self.whole.take(range(shard.first, shard.end), axis=head))
            for shard in shards
        ]

    def part(self, number: int) -> Array:
        """A view, its axes in the order of AXES."""
        return self.ordered(self.parts[number])

    def ordered(self, array: Array) -> Array:
        return array.transpose(0, *(1 + self.axes.index(axis) for axis in AXES))


def carry_out(move: Move, source: Array, target: Array, write_counts: Array) -> None:
    """Bytes, as a transport sees them; each that is written is counted."""
    units = (move.local, move.remote) if move.operation is Operation.WRITE else (move.remote, move.local)
    here, there, counts = (array.reshape(-1).view(np.uint8) for array in (source, target, write_counts))
    for taken, given_to in zip(*(unit * move.unit_bytes for unit in units), strict=True):
        there[given_to : given_to + move.unit_bytes] = here[taken : taken + move.unit_bytes]
        counts[given_to : given_to + move.unit_bytes] += 1


@st.composite
def shards_of(draw: st.DrawFn, heads: int) -> list[HeadRange]:
    """As a node's ranks keep them: an equal share, or the same one in several ranks, or all of them in each."""
    fitting = [size for size in (1, 2, 3, 4, 6, 8) if heads % size == 0 or size % heads == 0]
    size = draw(st.sampled_from(fitting))
    if draw(st.integers(0, 4)) == 0:
        return [HeadRange(0, heads)] * size
    kept = [heads_of_rank(heads, rank, size) for rank in range(size)]
    return [HeadRange(part.start, len(part)) for part in kept]


@settings(max_examples=250, deadline=None)
@given(
    slots=st.integers(1, 3),
    kv=st.integers(1, 2),
    heads=st.sampled_from([1, 2, 3, 4, 6]),
    dim=st.sampled_from([1, 3, 4]),
    tokens=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    layouts=st.one_of(
        st.just((list(AXES), list(AXES))),
        st.permutations(AXES).map(lambda order: (order, order)),
        st.tuples(st.permutations(AXES), st.permutations(AXES)),
    ),
    operation=st.sampled_from(Operation),
    data=st.data(),
)
def test_every_shard_gets_the_bytes_of_its_heads_once(
    slots: int, kv: int, heads: int, dim: int, tokens: tuple[int, int], layouts: tuple[list[str], list[str]],
    operation: Operation, data: st.DataObject,
) -> None:  # fmt: skip
    sizes = {"slot": slots, "kv": kv, "head": heads, "dim": dim}
    writes = operation is Operation.WRITE
    ours, theirs = (
        Pool(axes, {**sizes, "token": size}, data.draw(shards_of(heads)), filled)
        for axes, size, filled in zip(layouts, tokens, (writes, not writes), strict=True)
    )
    mapping = Mapping.between(ours.layout, theirs.layout, by_head=True)
    assert isinstance(mapping, Mapping)
    places = data.draw(
        st.lists(
            st.builds(
                GrainPlace,
                st.integers(1, BLOCKS - 1),
                st.integers(0, mapping.our_parts - 1),
                st.integers(1, BLOCKS - 1),
                st.integers(0, mapping.their_parts - 1),
            ),
            min_size=1,
            max_size=4,
            unique_by=(lambda place: (place.their_block, place.their_part), lambda place: (place.our_block, place.our_part)),
        )
    )  # fmt: skip
    layers = data.draw(st.one_of(st.none(), st.integers(0, slots - 1).map(lambda first: (first, slots))))
    lowest, highest = layers or (0, slots)
    source, target = (ours, theirs) if writes else (theirs, ours)
    expected = target.ordered(target.whole.copy())
    touched = np.zeros_like(expected)
    grain = mapping.grain
    for place in places:
        here, there = (place.our_block, place.our_part * grain), (place.their_block, place.their_part * grain)
        (block, first), (to_block, to_first) = (here, there) if writes else (there, here)
        given_away = source.ordered(source.whole)[block, lowest:highest, :, :, first : first + grain]
        expected[to_block, lowest:highest, :, :, to_first : to_first + grain] = given_away
        touched[to_block, lowest:highest, :, :, to_first : to_first + grain] = (
            0x0101  # both bytes of each element
        )
    counts = [np.zeros_like(part) for part in target.parts]
    pairs = set(pairs_between(ours.shards, theirs.shards))
    splitting = PoolSplit(ours.shards, theirs.shards)
    splitting.of(
        mapping.move(operation, "t", places[::-1], layers)
    )  # what it keeps of one move serves the next
    for one in splitting.of(mapping.move(operation, "t", places, layers)):
        assert (one.ours, one.theirs) in pairs
        giver, taker = (one.ours, one.theirs) if writes else (one.theirs, one.ours)
        carry_out(one.move, source.parts[giver], target.parts[taker], counts[taker])
    for number, shard in enumerate(target.shards):
        kept = slice(shard.first, shard.end)
        assert np.array_equal(target.part(number), expected[:, :, :, kept])
        assert np.array_equal(target.ordered(counts[number]), touched[:, :, :, kept]), (
            "each byte once, and no other"
        )


def test_equal_shards_move_whole_blocks() -> None:
    sizes = {"slot": 3, "kv": 2, "head": 4, "token": 8, "dim": 16}
    layout = BlockLayout(AXES, sizes, 2)
    mapping = Mapping.between(layout, layout, by_head=True)
    assert isinstance(mapping, Mapping)
    halves = (HeadRange(0, 2), HeadRange(2, 2))
    move = mapping.move(Operation.WRITE, "t", [GrainPlace(3, 0, 5, 0), GrainPlace(4, 0, 1, 0)])
    parts = PoolSplit(halves, halves).of(move)
    assert [(one.ours, one.theirs, one.move.unit_bytes) for one in parts] == [
        (rank, rank, layout.num_bytes // 2) for rank in (0, 1)
    ]
    assert [(one.move.local.tolist(), one.move.remote.tolist()) for one in parts] == [([3, 4], [5, 1])] * 2
    # A whole cache's block has two runs of each layer and part for two heads of four.
    whole = (HeadRange(0, 4),)
    assert [len(one.move.local) for one in PoolSplit(whole, halves).of(move)] == [2 * 3 * 2] * 2


@pytest.mark.parametrize(
    ("shards", "givers"),
    [
        ([(0, 2), (2, 2)], [0, 0, 1, 1]),
        ([(0, 1), (0, 1), (1, 1), (1, 1)], [0, 2]),
        ([(0, 4), (0, 4)], [0, 0, 1, 1]),
        ([(0, 3), (0, 3), (0, 3), (0, 3)], [0, 1, 2]),
    ],
)
def test_a_head_is_given_by_one_and_the_work_is_shared(
    shards: list[tuple[int, int]], givers: list[int]
) -> None:
    assert givers_of([HeadRange(*shard) for shard in shards]).tolist() == givers


def test_a_unit_of_several_heads_is_not_split() -> None:
    halves = (HeadRange(0, 1), HeadRange(1, 1))
    with pytest.raises(InternalError):
        PoolSplit(halves, halves).of(Move(Operation.WRITE, "t", 64, np.array([1]), np.array([2])))
