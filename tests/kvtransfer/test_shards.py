"""Moves between sharded pools, compared with a plain copy layer by layer, head by head and token by token."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from tandem.base.errors import InternalError
from tandem.engine.model.shard import heads_of_rank
from tandem.kvtransfer.protocol.cache_map import AXES, BlockLayout, GrainPlace, Mapping
from tandem.kvtransfer.protocol.shards import PoolSplit, givers_of, pairs_between, used_slots
from tandem.kvtransfer.protocol.transport import IndexRange, Move, Operation, ShardPart

BLOCKS = 6
GROUPS = 2
Array = npt.NDArray[np.uint16]


class Pool:
    """`whole` is what a node of one rank has. Each shard is memory of its own with some of its heads, and of its layers where it is of a
    stage. Which layers a block's slots are is its group's matter: in half of the blocks they are those of one group, in half of the other."""

    def __init__(self, axes: list[str], sizes: dict[str, int], shards: list[ShardPart], filled: bool) -> None:
        self.axes = axes
        self.shards = tuple(shards)
        self.layout = BlockLayout(tuple(axes), sizes, 2)
        shape = (BLOCKS, *(sizes[axis] for axis in axes))
        values = np.arange(np.prod(shape)) if filled else np.zeros(int(np.prod(shape)))
        self.whole: Array = values.astype(np.uint16).reshape(shape)
        self.parts: list[Array] = []
        for number, shard in enumerate(shards):
            kept = {"slot": shard.width or sizes["slot"], "head": shard.heads.count}
            self.parts.append(np.zeros((BLOCKS, *(kept.get(axis, sizes[axis]) for axis in axes)), dtype=np.uint16))
            for block in range(BLOCKS):
                slots, heads = self.kept(shard, block)
                target = self.part(number)[block]
                target[: len(slots)] = self.ordered(self.whole)[block][slots][:, :, heads]

    def kept(self, shard: ShardPart, block: int) -> tuple[list[int], list[int]]:
        """The slots and heads of this block."""
        slots = (
            shard.slots_of(group_of(block), self.layout.sizes["slot"])
            if shard.slots
            else IndexRange(0, self.layout.sizes["slot"])
        )
        return list(range(slots.first, slots.end)), list(range(shard.heads.first, shard.heads.end))

    def part(self, number: int) -> Array:
        """A view, its axes in the order of AXES."""
        return self.ordered(self.parts[number])

    def ordered(self, array: Array) -> Array:
        return array.transpose(0, *(1 + self.axes.index(axis) for axis in AXES))


def group_of(block: int) -> int:
    return block % GROUPS


def carry_out(move: Move, source: Array, target: Array, write_counts: Array) -> None:
    """Bytes, as a transport sees them; each that is written is counted."""
    units = (move.local, move.remote) if move.operation is Operation.WRITE else (move.remote, move.local)
    here, there, counts = (array.reshape(-1).view(np.uint8) for array in (source, target, write_counts))
    for taken, given_to in zip(*(unit * move.unit_bytes for unit in units), strict=True):
        there[given_to : given_to + move.unit_bytes] = here[taken : taken + move.unit_bytes]
        counts[given_to : given_to + move.unit_bytes] += 1


@st.composite
def shards_of(draw: st.DrawFn, heads: int, layers: tuple[int, ...]) -> list[ShardPart]:
    """As a node's ranks keep them: an equal share, or the same one in several ranks, or all of them in each. And in some nodes so in each
    stage, which has a run of each group's `layers`, and maybe none of some."""
    fitting = [size for size in (1, 2, 3, 4, 6, 8) if heads % size == 0 or size % heads == 0]
    size = draw(st.sampled_from(fitting))
    kept = [heads_of_rank(heads, rank, size) for rank in range(size)]
    if draw(st.integers(0, 4)) == 0:
        kept = [range(heads)] * size
    ranges = [IndexRange(part.start, len(part)) for part in kept]
    stages = draw(st.integers(1, 3))
    if stages == 1:
        return [ShardPart(part) for part in ranges]
    cuts = [sorted(draw(st.lists(st.integers(0, count), min_size=stages - 1, max_size=stages - 1))) for count in layers]
    bounds = [[0, *cut, count] for cut, count in zip(cuts, layers, strict=True)]
    found = []
    for stage in range(stages):
        slots = tuple(IndexRange(bound[stage], bound[stage + 1] - bound[stage]) for bound in bounds)
        if any(of_group.count for of_group in slots):
            found += [ShardPart(part, slots) for part in ranges]
    return found


@settings(max_examples=150, deadline=None)
@given(
    slots=st.integers(1, 4),
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
def test_every_shard_gets_the_bytes_of_its_layers_and_heads_once(
    slots: int, kv: int, heads: int, dim: int, tokens: tuple[int, int], layouts: tuple[list[str], list[str]],
    operation: Operation, data: st.DataObject,
) -> None:  # fmt: skip
    sizes = {"slot": slots, "kv": kv, "head": heads, "dim": dim}
    writes = operation is Operation.WRITE
    # The second group may have fewer layers than a block has slots.
    layers_of_group = (slots, data.draw(st.integers(1, slots)))
    ours, theirs = (
        Pool(axes, {**sizes, "token": size}, data.draw(shards_of(heads, layers_of_group)), filled)
        for axes, size, filled in zip(layouts, tokens, (writes, not writes), strict=True)
    )
    used = used_slots(ours.shards) or used_slots(theirs.shards)
    assert used in ((), layers_of_group)
    mapping = Mapping.between(ours.layout, theirs.layout, by_head=True, used_slots=used)
    assert isinstance(mapping, Mapping)
    places = data.draw(
        st.lists(
            st.builds(
                lambda group, block, part, to_block, to_part: GrainPlace(
                    block * GROUPS + group, part, to_block * GROUPS + group, to_part, group
                ),
                st.integers(0, GROUPS - 1),
                st.integers(0, BLOCKS // GROUPS - 1),
                st.integers(0, mapping.our_parts - 1),
                st.integers(0, BLOCKS // GROUPS - 1),
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
        end = min(highest, layers_of_group[place.group]) if used else highest  # no stage has the slots without layers
        given_away = source.ordered(source.whole)[block, lowest:end, :, :, first : first + grain]
        expected[to_block, lowest:end, :, :, to_first : to_first + grain] = given_away
        touched[to_block, lowest:end, :, :, to_first : to_first + grain] = 0x0101  # both bytes of each element
    counts = [np.zeros_like(part) for part in target.parts]
    pairs = set(pairs_between(ours.shards, theirs.shards))
    splitting = PoolSplit(ours.shards, theirs.shards)
    splitting.of(mapping.move(operation, "t", places[::-1], layers))  # what it keeps of one move serves the next
    for one in splitting.of(mapping.move(operation, "t", places, layers)):
        assert (one.ours, one.theirs) in pairs
        giver, taker = (one.ours, one.theirs) if writes else (one.theirs, one.ours)
        carry_out(one.move, source.parts[giver], target.parts[taker], counts[taker])
    for number, shard in enumerate(target.shards):
        for block in range(BLOCKS):
            of_layers, of_heads = target.kept(shard, block)
            have, count = target.part(number)[block], target.ordered(counts[number])[block]
            assert np.array_equal(have[: len(of_layers)], expected[block][of_layers][:, :, of_heads])
            assert np.array_equal(count[: len(of_layers)], touched[block][of_layers][:, :, of_heads]), "each byte once"
            assert not count[len(of_layers) :].any(), "and no other"


def test_equal_shards_move_whole_blocks() -> None:
    sizes = {"slot": 3, "kv": 2, "head": 4, "token": 8, "dim": 16}
    layout = BlockLayout(AXES, sizes, 2)
    mapping = Mapping.between(layout, layout, by_head=True)
    assert isinstance(mapping, Mapping)
    halves = shards((0, 2), (2, 2))
    move = mapping.move(Operation.WRITE, "t", [GrainPlace(3, 0, 5, 0), GrainPlace(4, 0, 1, 0)])
    parts = PoolSplit(halves, halves).of(move)
    assert [(one.ours, one.theirs, one.move.unit_bytes) for one in parts] == [
        (rank, rank, layout.num_bytes // 2) for rank in (0, 1)
    ]
    assert [(one.move.local.tolist(), one.move.remote.tolist()) for one in parts] == [([3, 4], [5, 1])] * 2
    # A whole cache's block has two runs of each layer and part for two heads of four.
    whole = shards((0, 4))
    assert [len(one.move.local) for one in PoolSplit(whole, halves).of(move)] == [2 * 3 * 2] * 2


def test_equal_stages_move_whole_blocks_and_layers_that_cross_go_alone() -> None:
    """A stage of three layers beside one of one, and two of two: the third goes from the first to the second."""
    layout = BlockLayout(AXES, {"slot": 4, "kv": 2, "head": 2, "token": 8, "dim": 16}, 2)
    each = layout.num_bytes // 4
    two, uneven = cut_at(2), cut_at(3)
    mapping = Mapping.between(layout, layout, by_head=True, used_slots=used_slots(two))
    assert isinstance(mapping, Mapping)
    move = mapping.move(Operation.WRITE, "t", [GrainPlace(3, 0, 5, 0), GrainPlace(4, 0, 1, 0)])
    alike = PoolSplit(two, two).of(move)
    assert [(one.ours, one.theirs, one.move.unit_bytes) for one in alike] == [(rank, rank, 2 * each) for rank in (0, 1)]
    assert [(one.move.local.tolist(), one.move.remote.tolist()) for one in alike] == [([3, 4], [5, 1])] * 2
    unlike = [(one.ours, one.theirs, one.move.num_bytes // each) for one in PoolSplit(uneven, two).of(move)]
    assert unlike == [(0, 0, 4), (0, 1, 2), (1, 1, 2)]
    assert pairs_between(uneven, two) == [(0, 0), (0, 1), (1, 1)]


def cut_at(layer: int) -> tuple[ShardPart, ...]:
    """Four layers in two stages."""
    return tuple(
        ShardPart(IndexRange(0, 2), (slots,)) for slots in (IndexRange(0, layer), IndexRange(layer, 4 - layer))
    )


def shards(*heads: tuple[int, int]) -> tuple[ShardPart, ...]:
    return tuple(ShardPart(IndexRange(*of_rank)) for of_rank in heads)


@pytest.mark.parametrize(
    ("heads", "givers"),
    [
        ([(0, 2), (2, 2)], [0, 0, 1, 1]),
        ([(0, 1), (0, 1), (1, 1), (1, 1)], [0, 2]),
        ([(0, 4), (0, 4)], [0, 0, 1, 1]),
        ([(0, 3), (0, 3), (0, 3), (0, 3)], [0, 1, 2]),
    ],
)
def test_a_head_is_given_by_one_and_the_work_is_shared(heads: list[tuple[int, int]], givers: list[int]) -> None:
    assert givers_of(shards(*heads)).tolist() == [givers]


def test_a_unit_of_several_heads_is_not_split() -> None:
    halves = shards((0, 1), (1, 1))
    with pytest.raises(InternalError):
        PoolSplit(halves, halves).of(Move(Operation.WRITE, "t", 64, np.array([1]), np.array([2])))
