"""Checksums of blocks: what they catch, and that both ends of a transfer agree whatever their caches look like."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from tandem.engine.model.shard import heads_of_rank
from tandem.kvtransfer.base import HeadShare, KVCacheMemory, LayerShare
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.cache_map import BlockLayout, Mapping, PoolGeometry
from tandem.kvtransfer.protocol.checksums import CacheChecksums, ChecksumSample, every_of, pack, unpack
from tandem.kvtransfer.protocol.shards import givers_of, part_of
from tandem.kvtransfer.protocol.transport import AskedSums
from tandem.wire.handoff import CacheMemory

BLOCKS, SLOTS, HEADS, DIM = 8, 3, 2, 8


class Cache:
    def __init__(self, block_size: int = 4, *, tokens_before_heads: bool = False, device: str = "DRAM") -> None:
        shape = (BLOCKS, SLOTS, 2, HEADS, block_size, DIM)
        if tokens_before_heads:
            self.tensor = torch.zeros(BLOCKS, SLOTS, 2, block_size, HEADS, DIM, dtype=torch.bfloat16)
            self.tensor = self.tensor.permute(0, 1, 2, 4, 3, 5)
        else:
            self.tensor = torch.zeros(shape, dtype=torch.bfloat16)
        self.cache = KVCacheMemory(self.tensor, "m", SLOTS, 1, 1000)
        self.memory = CacheMemory(b"", device, 0, 4096, BLOCKS, self.cache.block_bytes)
        self.geometry = PoolGeometry.of(self.cache, self.memory, "c")
        self.sums = CacheChecksums(self.cache)

    def fill(self, tokens: torch.Tensor, first_block: int) -> None:
        """Writes tokens, [slots, 2, heads, tokens, dim], into consecutive blocks."""
        size = self.cache.block_size
        for index in range(tokens.shape[3] // size):
            self.tensor[first_block + index] = tokens[:, :, :, index * size : (index + 1) * size]

    def mapping_to(self, other: Cache) -> Mapping:
        mapping = self.geometry.mapping_to(other.geometry.fingerprint, other.memory)
        assert isinstance(mapping, Mapping)
        return mapping

    def all_sums(self, other: Cache, first_block: int, blocks: int) -> list[int]:
        mapping = self.mapping_to(other)
        grains = [(first_block + index, part) for index in range(blocks) for part in range(mapping.our_parts)]
        return self.sums.of([block for block, _ in grains], [part for _, part in grains], mapping)


def some_tokens(count: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(SLOTS, 2, HEADS, count, DIM).bfloat16()


@pytest.mark.parametrize("device", ["DRAM", "VRAM"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"tokens_before_heads": True}, {"tokens_before_heads": True}),
        ({}, {"tokens_before_heads": True}),
        ({"block_size": 4}, {"block_size": 8}),
        ({"block_size": 8, "tokens_before_heads": True}, {"block_size": 4}),
    ],
)
def test_both_ends_find_the_same(ours: dict[str, int], theirs: dict[str, int], device: str) -> None:
    """A device computes another checksum, and the same code computes it for a tensor in host memory."""
    here, there = Cache(**ours), Cache(**theirs, device=device)  # type: ignore[arg-type]
    tokens = some_tokens(16)
    here.fill(tokens, 1)
    there.fill(tokens, 2)
    found = here.all_sums(there, 1, 16 // here.cache.block_size)
    assert found == there.all_sums(here, 2, 16 // there.cache.block_size)
    assert len(set(found)) == len(found)
    assert all(0 <= value < 1 << 64 for value in found)


@pytest.mark.parametrize("device", ["DRAM", "VRAM"])
def test_any_flipped_bit_and_any_swap_is_found(device: str) -> None:
    here, there = Cache(), Cache(device=device)
    here.fill(some_tokens(4), 1)
    mapping = here.mapping_to(there)
    [right] = here.sums.of([1], [0], mapping)
    raw = here.tensor.view(torch.uint8)[1].reshape(-1)
    for byte in range(0, len(raw), 7):
        for bit in (0, 7):
            raw[byte] ^= 1 << bit
            assert here.sums.of([1], [0], mapping) != [right]
            raw[byte] ^= 1 << bit
    assert here.sums.of([1], [0], mapping) == [right]
    here.tensor[1, 0], here.tensor[1, 1] = here.tensor[1, 1].clone(), here.tensor[1, 0].clone()
    assert here.sums.of([1], [0], mapping) != [right]


def in_shards(tensor: torch.Tensor, ranks: int, cut: int | None = None) -> list[KVCacheMemory]:
    """What each of so many ranks keeps of a cache, in each of two stages where the layers are `cut`."""
    kept = [heads_of_rank(HEADS, rank, ranks) for rank in range(ranks)]
    stages = [(0, SLOTS)] if cut is None else [(0, cut), (cut, SLOTS - cut)]
    return [
        KVCacheMemory(
            tensor[:, first : first + count, :, part.start : part.stop].contiguous(), "m", SLOTS, 1, 1000,
            heads=HeadShare(part.start, len(part), HEADS),
            layers=None if cut is None else LayerShare(((first, count),), SLOTS),
        )
        for first, count in stages
        for part in kept
    ]  # fmt: skip


def sums_of(ranks: list[KVCacheMemory], mapping: Mapping, blocks: list[int], *, arrived: bool) -> list[int]:
    """The checksums as rank 0 computes them: it asks the other ranks for theirs."""
    parts = [0] * len(blocks)
    others = [CacheChecksums(rank) for rank in ranks[1:]]

    def elsewhere(blocks: Any, parts: Any, grain: int, on_device: bool, by_layer: bool) -> Any:
        return AskedSums(
            lambda: [one.of_heads(blocks, parts, grain, on_device=on_device, by_layer=by_layer) for one in others]
        )

    groups = [0] * len(blocks)
    return CacheChecksums(ranks[0], elsewhere).of(blocks, parts, mapping, groups=groups, arrived=arrived)


def mapping_by_head(on_device: bool, *, by_layer: bool = False) -> Mapping:
    here = Cache()
    layout = BlockLayout.of(here.geometry.fingerprint, here.memory)
    assert isinstance(layout, BlockLayout)
    used = (SLOTS,) if by_layer else ()
    mapping = Mapping.between(layout, layout, on_device=on_device, by_head=True, used_slots=used)
    assert isinstance(mapping, Mapping)
    return mapping


@pytest.mark.parametrize("on_device", [False, True])
def test_nodes_of_all_widths_find_the_same(on_device: bool) -> None:
    here = Cache()
    here.fill(some_tokens(16), 1)
    mapping, blocks = mapping_by_head(on_device), [1, 2, 3, 4]
    found = {
        tuple(sums_of(in_shards(here.tensor, ranks), mapping, blocks, arrived=arrived))
        for ranks in (1, 2, 4)
        for arrived in (False, True)
    }
    found.add(tuple(here.sums.of(blocks, [0] * 4, mapping, arrived=True)))
    assert len(found) == 1
    assert len(set(*found)) == 4


@pytest.mark.parametrize("on_device", [False, True])
def test_nodes_of_all_stages_find_the_same_and_every_copy_counts(on_device: bool) -> None:
    here = Cache()
    here.fill(some_tokens(16), 1)
    mapping, blocks = mapping_by_head(on_device, by_layer=True), [1, 2, 3, 4]
    found = {
        tuple(sums_of(in_shards(here.tensor, ranks, cut), mapping, blocks, arrived=arrived))
        for ranks in (1, 2, 4)
        for cut in (None, *range(1, SLOTS))
        for arrived in (False, True)
    }
    assert len(found) == 1
    assert len(set(*found)) == 4
    right = sums_of(in_shards(here.tensor, 1), mapping, [1], arrived=True)
    for spoiled in range(8):
        ranks = in_shards(here.tensor, 4, 1)
        ranks[spoiled].tensor[1].view(-1).view(torch.uint8)[9] ^= 4
        assert sums_of(ranks, mapping, [1], arrived=True) != right


def test_slots_that_no_layer_of_a_group_has_are_not_summed_up() -> None:
    """They hold what another group left there, and a stage does not have them."""
    here = Cache()
    here.fill(some_tokens(8), 1)
    layout = BlockLayout.of(here.geometry.fingerprint, here.memory)
    assert isinstance(layout, BlockLayout)
    mapping = Mapping.between(layout, layout, by_head=True, used_slots=(SLOTS, SLOTS - 1))
    assert isinstance(mapping, Mapping)
    right = here.sums.of([1, 1], [0, 0], mapping, groups=[0, 1])
    here.tensor[1, SLOTS - 1] += 1
    changed = here.sums.of([1, 1], [0, 0], mapping, groups=[0, 1])
    assert right[0] != changed[0]
    assert right[1] == changed[1] != right[0]


@pytest.mark.parametrize("on_device", [False, True])
def test_every_copy_of_a_head_that_arrived_is_looked_at(on_device: bool) -> None:
    """Of what is sent only the copy that is given away counts: others may differ in rounding."""
    here = Cache()
    here.fill(some_tokens(4), 1)
    mapping = mapping_by_head(on_device)
    right = here.sums.of([1], [0], mapping)
    givers = givers_of([part_of(rank) for rank in in_shards(here.tensor, 4)])
    for spoiled in range(4):
        ranks = in_shards(here.tensor, 4)
        ranks[spoiled].tensor[1].view(-1).view(torch.uint8)[9] ^= 4
        assert sums_of(ranks, mapping, [1], arrived=True) != right
        assert (sums_of(ranks, mapping, [1], arrived=False) != right) == (spoiled in givers)


def test_a_sample_is_the_same_for_both_sides_however_it_is_asked_for() -> None:
    token_hash = bytes([37]) * 32
    sample = ChecksumSample.of(100, 16, token_hash)
    everything = sample.between(0, 100)
    assert everything == [5, 21, 37, 53, 69, 85, 99]
    assert sample.between(0, 50) + sample.between(50, 100) == everything
    assert ChecksumSample.of(3, 16, token_hash).between(0, 3) == [2], "each transfer is looked at once"
    assert ChecksumSample.of(3, 1, token_hash).between(0, 3) == [0, 1, 2]
    assert ChecksumSample.of(3, 0, token_hash).between(0, 3) == []


@pytest.mark.parametrize(
    ("policy", "is_doubtful", "every"),
    [("all", False, 1), ("sample", False, 16), ("sample", True, 1), ("off", False, 0), ("off", True, 0)],
)
def test_policies(policy: str, is_doubtful: bool, every: int) -> None:
    assert every_of(ChecksumPolicy(policy), is_doubtful=is_doubtful) == every


def test_packed_checksums_come_back() -> None:
    sums = [0, 1, (1 << 64) - 1]
    assert unpack(pack(sums)) == sums
    assert unpack(pack(sums)[:-1]) == sums[:-1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pack(sums)), type=bytes) == pack(sums)
