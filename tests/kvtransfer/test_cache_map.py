"""The mapping between pools of different shapes, compared with a plain copy token by token."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import HeadShare, KVCacheMemory
from tandem.kvtransfer.protocol.cache_map import AXES, GrainPlace, Mapping, PoolGeometry
from tandem.kvtransfer.protocol.transport import CutAxis, Move, Operation
from tandem.wire.handoff import CacheMemory, CacheShard, ProcessIdentity

NUM_BLOCKS = 7


def pool(sizes: dict[str, int], block_size: int, axes: list[str], dtype: torch.dtype) -> torch.Tensor:
    """A pool with the contract's order of axes, but with the memory layout that `axes` names."""
    sizes = {**sizes, "token": block_size}
    count = NUM_BLOCKS
    for axis in AXES:
        count *= sizes[axis]
    made = torch.arange(count).to(dtype).view(NUM_BLOCKS, *(sizes[axis] for axis in axes))
    return made.permute(0, *(1 + axes.index(axis) for axis in AXES))


def geometry(tensor: torch.Tensor) -> PoolGeometry:
    cache = KVCacheMemory(tensor, "m", tensor.shape[1], 1, 1000)
    memory = CacheMemory(b"x", "DRAM", 0, 4096, NUM_BLOCKS, cache.block_bytes)
    return PoolGeometry.of(cache, memory, "test/push")


def mapping_between(ours: torch.Tensor, theirs: torch.Tensor) -> Mapping | str:
    other = geometry(theirs)
    return geometry(ours).mapping_to(other.fingerprint, other.memory)


def carry_out(move: Move, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Copies the move's byte ranges, as a transport does."""
    source, target = (
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).view(-1) for tensor in (ours, theirs)
    )
    for local, remote in zip(
        (move.local * move.unit_bytes).tolist(), (move.remote * move.unit_bytes).tolist(), strict=True
    ):
        target[remote : remote + move.unit_bytes] = source[local : local + move.unit_bytes]


axes = st.permutations(AXES)
powers = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=80, deadline=None)
@given(
    slots=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 4]),
    sizes=st.tuples(powers, powers),
    layouts=st.one_of(axes.map(lambda order: (order, order)), st.tuples(axes, axes)),
    dtype=st.sampled_from([torch.int32, torch.int16]),
    data=st.data(),
)
def test_what_is_mapped_is_what_a_copy_token_by_token_makes(
    slots: int, heads: int, dim: int, sizes: tuple[int, int], layouts: tuple[list[str], list[str]], dtype: torch.dtype,
    data: st.DataObject,
) -> None:  # fmt: skip
    shape = {"slot": slots, "kv": 2, "head": heads, "dim": dim}
    ours = pool(shape, sizes[0], layouts[0], dtype)
    theirs = pool(shape, sizes[1], layouts[1], dtype) * 0 - 1
    theirs = pool(shape, sizes[1], layouts[1], dtype).copy_(theirs)
    mapping = mapping_between(ours, theirs)
    assert isinstance(mapping, Mapping)
    assert mapping.grain == min(sizes)
    places = data.draw(
        st.lists(
            st.builds(
                GrainPlace,
                st.integers(1, NUM_BLOCKS - 1),
                st.integers(0, mapping.our_parts - 1),
                st.integers(1, NUM_BLOCKS - 1),
                st.integers(0, mapping.their_parts - 1),
            ),
            min_size=1,
            max_size=4,
            unique_by=lambda place: (place.their_block, place.their_part),
        )
    )
    layers = data.draw(st.one_of(st.none(), st.integers(0, slots - 1).map(lambda s: (s, slots))))
    expected = theirs.clone()
    lowest, highest = layers or (0, slots)
    for place in places:
        for token in range(mapping.grain):
            expected[place.their_block, lowest:highest, :, :, place.their_part * mapping.grain + token] = ours[
                place.our_block, lowest:highest, :, :, place.our_part * mapping.grain + token
            ]
    move = mapping.move(Operation.WRITE, "t", places, layers)
    carry_out(move, ours, theirs)
    assert torch.equal(theirs, expected)
    if layers is None:
        assert move.num_bytes == len(places) * mapping.grain_bytes
        assert len(move.local) == len(places) * mapping.runs_per_grain


@pytest.mark.parametrize(
    ("sizes", "dtypes", "why"),
    [
        ((8, 12), (torch.int32, torch.int32), "block_size is 8 here and 12 there: one must be a multiple"),
        ((8, 8), (torch.int32, torch.int16), "dtype is 'int32' here and 'int16' there"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(
    sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], why: str
) -> None:
    shape = {"slot": 3, "kv": 2, "head": 2, "dim": 4}
    refused = mapping_between(
        *(pool(shape, size, list(AXES), dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    )
    assert isinstance(refused, str)
    assert why in refused


def test_a_cache_with_gaps_is_refused_at_once() -> None:
    tensor = torch.zeros(4, 2, 2, 1, 4, 8)[:, :1]
    with pytest.raises(ConfigurationError, match="gaps"):
        geometry(tensor)


NUM_HEADS = 4
ME = ProcessIdentity("here", 1, 2, 3)


def sharded_memory(tensor: torch.Tensor, *shards: tuple[int, int]) -> CacheMemory:
    parts = [CacheShard(first, count, b"x", "DRAM", 0, 4096, ME) for first, count in shards]
    return CacheMemory(b"", "DRAM", 0, 0, NUM_BLOCKS, geometry(tensor).memory.block_bytes, parts)


def four_heads() -> torch.Tensor:
    return pool({"slot": 3, "kv": 2, "head": NUM_HEADS, "dim": 4}, 8, list(AXES), torch.int32)


def test_a_cache_in_shards_is_mapped_head_by_head_on_both_sides() -> None:
    here = geometry(four_heads())
    memory = sharded_memory(four_heads(), (0, 2), (2, 2))
    in_shards = PoolGeometry.of(
        KVCacheMemory(four_heads()[:, :, :, :2].contiguous(), "m", 3, 1, 1000, heads=HeadShare(0, 2, NUM_HEADS)),
        memory,
        "test/push",
    )  # fmt: skip
    assert in_shards.fingerprint == here.fingerprint
    mappings = [here.mapping_to(in_shards.fingerprint, memory), in_shards.mapping_to(here.fingerprint, here.memory)]
    for mapping in mappings:
        assert isinstance(mapping, Mapping)
        assert mapping.heads == CutAxis(NUM_HEADS, 8 * 4 * 4, 8 * 4 * 4)
        assert not mapping.is_identity
        assert mapping.runs_per_grain == 3 * 2 * NUM_HEADS
    plain = here.mapping_to(here.fingerprint, here.memory)
    assert isinstance(plain, Mapping)
    assert plain.heads is None
    assert plain.is_identity


@pytest.mark.parametrize(
    ("shards", "changed", "why"),
    [
        ([(0, 2)], {}, "the other node's ranks keep 2 of 4 heads"),
        ([(0, 2), (2, 3)], {}, "a rank of the other node keeps heads 2 to 5 of 4"),
        ([(0, 4), (1, 0)], {}, "a rank of the other node keeps heads 1 to 1 of 4"),
        ([(-1, 5)], {}, "a rank of the other node keeps heads -1 to 4 of 4"),
        ([(0, 4)] * 65, {}, "in 65 shards"),
        ([(0, 4)], {"base_address": 4096}, "lies at 0x1000, and in 1 shards"),
        ([(0, 4)], {"memory_type": "VRAM"}, "keep their heads in VRAM and in DRAM"),
        ([], {}, "the other cache cannot lie at 0x0 of device 0"),  # what a version that knows no shards reads
    ],
)
def test_shards_that_cannot_be_are_refused(shards: list[tuple[int, int]], changed: dict[str, object], why: str) -> None:
    here = geometry(four_heads())
    memory = msgspec.structs.replace(sharded_memory(four_heads(), *shards), **changed)
    refused = here.mapping_to(here.fingerprint, memory)
    assert isinstance(refused, str)
    assert why in refused


HEADS_OF_TWO = ((0, 2), (2, 2))


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ([[(0, 2)], [(2, 1)]], None),
        ([[(0, 1)], [(1, 1)], [(2, 1)]], None),
        ([[(0, 2)], [(1, 1)]], "the other node's stages keep 2 of 3 layers"),
        ([[(0, 1)], [(2, 1)]], "keep 0 of 4 heads in slot 1 of group 0"),
        ([[(0, 2)], [(2, 2)]], "keeps slots [(2, 2)] of 3 in 1 groups"),
        ([[(0, 2)], [(2, -1)]], "keeps slots [(2, -1)] of 3 in 1 groups"),
        ([[(0, 2)], [(2, 1), (0, 1)]], "keeps slots [(2, 1), (0, 1)] of 3 in 1 groups"),
        ([[(0, 2)], []], "keeps slots [] of 3 in 1 groups"),
        ([[(0, 0)], [(0, 0)]], "none of the other node's stages keeps a layer of group 0"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: list[list[tuple[int, int]]], why: str | None) -> None:
    """Each of two ranks, that have two heads of four."""
    here = geometry(four_heads())
    shards = [CacheShard(*heads, b"x", "DRAM", 0, 4096, ME, slots) for slots in stages for heads in HEADS_OF_TWO]
    memory = msgspec.structs.replace(sharded_memory(four_heads()), shards=shards)
    mapping = here.mapping_to(here.fingerprint, memory)
    if why is None:
        assert isinstance(mapping, Mapping)
        assert mapping.used_slots == (3,)
        assert mapping.layers == CutAxis(3, 2 * NUM_HEADS * 8 * 4 * 4, 2 * NUM_HEADS * 8 * 4 * 4)
        return
    assert isinstance(mapping, str)
    assert why in mapping


class EarlierMemory(msgspec.Struct, frozen=True):
    """The message of a version that knows no shards."""

    agent_metadata: bytes
    memory_type: str
    device_id: int
    base_address: int
    num_blocks: int
    block_bytes: int


def test_a_version_that_knows_no_shards_reads_a_cache_that_cannot_be() -> None:
    sent = msgspec.msgpack.encode(sharded_memory(four_heads(), (0, 2), (2, 2)))
    read = msgspec.msgpack.decode(sent, type=EarlierMemory)
    assert read.base_address == 0
    assert read.agent_metadata == b""
    # An earlier version's message describes a cache in one piece.
    earlier = EarlierMemory(b"x", "DRAM", 0, 4096, NUM_BLOCKS, 64)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(earlier), type=CacheMemory).shards == []
