"""Describes our KV cache, decides whether a peer's fits it, and says which bytes of the two correspond. What a peer
says of its cache is used nowhere before it was checked here.

The unit of moving is a *grain*: as many tokens as the smaller of the two nodes' blocks has. One grain lies within one
block on either side. Its bytes are runs that are contiguous on both sides: a whole block if the blocks have the same
layout, else as much as their innermost axes have in common. All runs are equally long and lie at multiples of their
length, so one number names a run: see `Move`. If either cache is in shards, a run belongs to one head, and to one layer
if the shards belong to pipeline stages (`shards`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import NULL_BLOCK_ID, KVCacheMemory
from tandem.kvtransfer.protocol.commands import BlockTable
from tandem.kvtransfer.protocol.shards import shards_in, used_slots
from tandem.kvtransfer.protocol.transport import CutAxis, Move, Operation, UnitIds
from tandem.wire.handoff import CacheFingerprint, CacheMemory, CacheShard, RegisterDestination
from tandem.wire.versions import out_of_reach

AXES = ("slot", "kv", "head", "token", "dim")
"""The axes of a block, in the order in which Tandem's own caches lie in memory, outermost first."""


class BlockLayout(msgspec.Struct, frozen=True):
    """How one block lies in memory, without gaps."""

    axes: tuple[str, ...]  # outermost first
    sizes: dict[str, int]
    element_bytes: int

    @classmethod
    def of(cls, fingerprint: CacheFingerprint, memory: CacheMemory) -> BlockLayout | str:
        """Returns the layout that a node describes, or why no block can have it."""
        axes = tuple(fingerprint.layout.split(","))
        if sorted(axes) != sorted(AXES):
            return f"a block has the axes {fingerprint.layout!r}, expected {','.join(AXES)} in some order"
        sizes = {
            "slot": fingerprint.num_slots,
            "kv": fingerprint.num_parts,
            "head": fingerprint.num_kv_heads,
            "token": fingerprint.block_size,
            "dim": fingerprint.head_dim,
        }
        elements = 1
        for size in sizes.values():
            if not 0 < size < 1 << 20:
                return f"a block of {sizes}"
            elements *= size
        element_bytes, rest = divmod(memory.block_bytes, elements)
        if rest or not 0 < element_bytes <= 16:
            return f"a block of {elements} elements in {memory.block_bytes} bytes"
        return cls(axes, sizes, element_bytes)

    def strides(self) -> dict[str, int]:
        """Returns, for each axis, the bytes from one index to the next."""
        strides: dict[str, int] = {}
        stride = self.element_bytes
        for axis in reversed(self.axes):
            strides[axis] = stride
            stride *= self.sizes[axis]
        return strides

    @property
    def num_bytes(self) -> int:
        strides = self.strides()
        return strides[self.axes[0]] * self.sizes[self.axes[0]]


class _Runs:
    """The runs of one grain on both sides, counted from the block's beginning."""

    def __init__(self, ours: BlockLayout, theirs: BlockLayout, grain: int, *, by_slot: bool, by_head: bool) -> None:
        mine, other = ours.strides(), theirs.strides()
        sizes = dict(ours.sizes, token=grain)
        run = ours.element_bytes
        inside: set[str] = set()
        # From the inside out, an axis belongs to the run as long as both sides have it dense and in the same order.
        for axis, other_axis in zip(reversed(ours.axes), reversed(theirs.axes), strict=True):
            if axis != other_axis or not mine[axis] == other[axis] == run:
                break
            if (by_slot and axis == "slot") or (by_head and axis == "head"):
                break
            inside.add(axis)
            run *= sizes[axis]
        self.bytes = run
        outside = [axis for axis in ours.axes if axis not in inside]
        # The slot comes first, so that a layer's runs are one row.
        outside.sort(key=lambda axis: (axis != "slot", ours.axes.index(axis)))
        self.ours = self._offsets(outside, sizes, mine)
        self.theirs = self._offsets(outside, sizes, other)

    def _offsets(self, axes: list[str], sizes: dict[str, int], strides: dict[str, int]) -> UnitIds:
        """Returns where the runs lie, in units of a run: [slots or 1, runs]."""
        offsets = np.zeros(1, dtype=np.int64)
        for axis in axes:
            steps = np.arange(sizes[axis], dtype=np.int64) * (strides[axis] // self.bytes)
            offsets = (offsets[:, None] + steps).reshape(-1)
        return offsets.reshape(sizes["slot"], -1) if "slot" in axes else offsets.reshape(1, -1)


class GrainPlace(msgspec.Struct, frozen=True):
    """Where one grain lies: in which block of ours and of theirs, and as which of the block's grains. `group`: the KV
    cache group whose layers it has."""

    our_block: int
    our_part: int
    their_block: int
    their_part: int
    group: int = 0


class Mapping:
    """Says which bytes of our blocks and a peer's correspond."""

    def __init__(
        self,
        ours: BlockLayout,
        theirs: BlockLayout,
        *,
        on_device: bool = False,
        state_blocks: int = 0,
        by_head: bool = False,
        used_slots: Sequence[int] = (),
    ) -> None:
        self.on_device = on_device  # True if either cache is on a device
        # If either cache is in shards, each unit that moves, and each sum, is one head's. If the shards belong to
        # stages, it is one layer's as well, and `used_slots` has how many slots of each group have layers.
        self.heads = _cut_axis("head", ours, theirs) if by_head else None
        self.layers = _cut_axis("slot", ours, theirs) if used_slots else None
        self.used_slots = tuple(used_slots)
        # How many state blocks each request has in the last group. Each is a grain. They are sent last, because they
        # are right only when the whole prompt has been computed.
        self.state_blocks = state_blocks
        self.grain = min(ours.sizes["token"], theirs.sizes["token"])
        self.our_parts = ours.sizes["token"] // self.grain  # grains per block
        self.their_parts = theirs.sizes["token"] // self.grain
        self._bytes = (ours.num_bytes, theirs.num_bytes)
        self._part_bytes = (ours.strides()["token"] * self.grain, theirs.strides()["token"] * self.grain)
        self._whole = _Runs(ours, theirs, self.grain, by_slot=bool(used_slots), by_head=by_head)
        self._by_slot = _Runs(ours, theirs, self.grain, by_slot=True, by_head=by_head)
        self.grain_bytes = ours.num_bytes // self.our_parts
        self.runs_per_grain = int(self._whole.ours.size)

    @property
    def is_identity(self) -> bool:
        """True if blocks have the same bytes in the same order on both sides, in one piece."""
        return self.our_parts == self.their_parts == self.runs_per_grain == 1 and self.heads is None

    @staticmethod
    def between(
        ours: BlockLayout,
        theirs: BlockLayout,
        *,
        on_device: bool = False,
        state_blocks: int = 0,
        by_head: bool = False,
        used_slots: Sequence[int] = (),
    ) -> Mapping | str:
        """Returns the mapping, or why there is none."""
        mine, other = ours.sizes["token"], theirs.sizes["token"]
        if max(mine, other) % min(mine, other):
            return f"block_size is {mine} here and {other} there: one must be a multiple of the other"
        if ours.element_bytes != theirs.element_bytes:
            return f"an element has {ours.element_bytes} bytes here and {theirs.element_bytes} there"
        mapping = Mapping(
            ours, theirs, on_device=on_device, state_blocks=state_blocks, by_head=by_head, used_slots=used_slots
        )
        if state_blocks and by_head:
            return "recurrent states are not handed over where a node's ranks keep their heads apart"
        if state_blocks and not mapping.is_identity:
            return "recurrent states are handed over between equal blocks alone: block_size or layout differ"
        return mapping

    def grains(self, num_tokens: int) -> int:
        """Returns how many grains `num_tokens` tokens take."""
        return -(-num_tokens // self.grain)

    def all_grains(self, num_tokens: int) -> int:
        """Returns the grains of the tokens and of the states, which come after them."""
        return self.grains(num_tokens) + self.state_blocks

    def positions(
        self, num_tokens: int, first_block: Sequence[int], tables: BlockTable, parts: int
    ) -> list[tuple[int, int]]:
        """Returns (group, index) of every grain of the request that has a block in these tables. A block has `parts`
        grains."""
        end = self.grains(num_tokens)
        found = [
            (group, index)
            for group, (first, ids) in enumerate(zip(first_block, tables, strict=True))
            if not self.is_state(group, len(tables))
            for index in range(first * parts, min(end, (first + len(ids)) * parts))
            if ids[index // parts - first] != NULL_BLOCK_ID
        ]
        if self.state_blocks:
            found += [(len(tables) - 1, end + number) for number in range(len(tables[-1]))]
        return found

    def is_state(self, group: int, num_groups: int) -> bool:
        return self.state_blocks > 0 and group + 1 == num_groups

    def block_of(self, group: int, index: int, num_tokens: int, num_groups: int, parts: int) -> int:
        """Returns the place of a grain's block in its group's table, counted from the request's beginning."""
        if self.is_state(group, num_groups):
            return index - self.grains(num_tokens)
        return index // parts

    def move(
        self, operation: Operation, transfer_id: str, places: Sequence[GrainPlace], slots: tuple[int, int] | None = None
    ) -> Move:
        """Returns the move of these grains: whole ones, or only their layers in slots `slots[0]` to `slots[1]`."""
        runs = self._whole if slots is None else self._by_slot
        where = np.array(
            [(place.our_block, place.our_part, place.their_block, place.their_part) for place in places], dtype=np.int64
        )
        local, remote = (
            self._units(where[:, side], where[:, side + 1], offsets, side // 2, runs.bytes, slots)
            for side, offsets in ((0, runs.ours), (2, runs.theirs))
        )
        groups = None
        if self.layers is not None:
            groups = np.array([place.group for place in places], dtype=np.int64)
        grain_units = len(local) // len(places)
        return Move(operation, transfer_id, runs.bytes, local, remote, self.heads, grain_units, self.layers, groups)

    def _units(
        self, blocks: UnitIds, parts: UnitIds, offsets: UnitIds, side: int, run: int, slots: tuple[int, int] | None
    ) -> UnitIds:
        if slots is not None:
            offsets = offsets[slots[0] : slots[1]]
        begins = blocks * (self._bytes[side] // run) + parts * (self._part_bytes[side] // run)
        units: UnitIds = (begins[:, None] + offsets.reshape(1, -1)).reshape(-1)
        return units


def _cut_axis(axis: str, ours: BlockLayout, theirs: BlockLayout) -> CutAxis:
    return CutAxis(ours.sizes[axis], ours.strides()[axis], theirs.strides()[axis])


MAX_BLOCKS = 1 << 22  # a transport makes a descriptor for each of a peer's blocks
MAX_DEVICES = 1024
MAX_SHARDS = 64
MAX_EVERY = 1 << 16  # at least one grain of this many carries a checksum
ADDRESS_SPACE = 1 << 63
MAPPED = ("block_size", "layout")  # may differ if Mapping.between finds a mapping
MAY_DIFFER = (*MAPPED, "wire_version")


def _implausible(memory: CacheMemory, fingerprint: CacheFingerprint) -> str | None:
    """Returns why a peer cannot have this memory; None if it can."""
    num_heads = fingerprint.num_kv_heads
    if not 1 < memory.num_blocks <= MAX_BLOCKS:
        return f"the other cache has {memory.num_blocks} blocks"
    if len(memory.shards) > MAX_SHARDS or (memory.shards and memory.base_address):
        return f"the other cache lies at {memory.base_address:#x}, and in {len(memory.shards)} shards"
    places: Sequence[CacheMemory | CacheShard] = memory.shards or [memory]
    for place in places:
        end = place.base_address + memory.num_blocks * memory.block_bytes
        if place.base_address <= 0 or end > ADDRESS_SPACE or not 0 <= place.device_id < MAX_DEVICES:
            return f"the other cache cannot lie at {place.base_address:#x} of device {place.device_id}"
    if not memory.shards:
        return None
    for shard in memory.shards:
        if not 0 <= shard.first_head < shard.first_head + shard.num_heads <= num_heads:
            return f"a rank of the other node keeps heads {shard.first_head} to {shard.first_head + shard.num_heads} of {num_heads}"
        if shard.memory_type != memory.memory_type:
            return f"its ranks keep their heads in {memory.memory_type} and in {shard.memory_type}"
    if any(shard.slots for shard in memory.shards):
        return _implausible_stages(memory.shards, fingerprint)
    return _lacking(memory.shards, num_heads)


def _lacking(shards: Sequence[CacheShard], num_heads: int) -> str | None:
    kept = {head for shard in shards for head in range(shard.first_head, shard.first_head + shard.num_heads)}
    if len(kept) < num_heads:
        return f"the other node's ranks keep {len(kept)} of {num_heads} heads"
    return None


def _implausible_stages(shards: Sequence[CacheShard], fingerprint: CacheFingerprint) -> str | None:
    """Returns why these shards cannot make a whole cache; None if they can. In each group every layer must have a slot
    of its own, from slot 0 on, and the shards that have it must keep all heads."""
    layers = 0
    for group in range(fingerprint.num_groups):
        ends = set()
        for shard in shards:
            first, count = shard.slots[group] if group < len(shard.slots) else (0, 0)
            if len(shard.slots) != fingerprint.num_groups or not 0 <= first <= first + count <= fingerprint.num_slots:
                return f"a rank of the other node keeps slots {shard.slots} of {fingerprint.num_slots} in {fingerprint.num_groups} groups"
            if count:
                ends.add(first + count)
        if not ends:
            return f"none of the other node's stages keeps a layer of group {group}"
        layers += max(ends)
        for slot in range(max(ends)):
            keepers = [one for one in shards if one.slots[group][0] <= slot < sum(one.slots[group])]
            if (why := _lacking(keepers, fingerprint.num_kv_heads)) is not None:
                return f"{why} in slot {slot} of group {group}"
    if layers != fingerprint.num_layers:
        return f"the other node's stages keep {layers} of {fingerprint.num_layers} layers"
    return None


class PoolGeometry(msgspec.Struct, frozen=True):
    fingerprint: CacheFingerprint
    memory: CacheMemory
    block_size: int
    num_groups: int
    vocab_size: int  # token ids are below this
    has_windows: bool = False  # a running request may give up blocks before its window
    state_blocks: int = 0  # of each request, in the last group

    @classmethod
    def of(cls, cache: KVCacheMemory, memory: CacheMemory, connector: str) -> PoolGeometry:
        return cls(
            fingerprint=CacheFingerprint(
                model=cache.model,
                dtype=str(cache.tensor.dtype).removeprefix("torch."),
                num_layers=cache.num_layers,
                num_parts=cache.num_parts,
                num_kv_heads=cache.all_heads,
                head_dim=cache.head_dim,
                block_size=cache.block_size,
                layout=layout_of(cache),
                connector=connector,
                num_slots=cache.all_slots,
                num_groups=cache.num_groups,
                state_blocks=cache.state_blocks,
            ),
            memory=memory,
            block_size=cache.block_size,
            num_groups=cache.num_groups,
            vocab_size=cache.vocab_size,
            has_windows=cache.has_windows,
            state_blocks=cache.state_blocks,
        )

    def mapping_to(self, fingerprint: CacheFingerprint, memory: CacheMemory) -> Mapping | str:
        """Returns the mapping between our blocks and the peer's, or why its KV cannot become ours."""
        differing = [
            f"{field} is {getattr(self.fingerprint, field)!r} here and {getattr(fingerprint, field)!r} there"
            for field in CacheFingerprint.__struct_fields__
            if field not in MAY_DIFFER and getattr(self.fingerprint, field) != getattr(fingerprint, field)
        ]
        if (why := out_of_reach(fingerprint.wire_version)) is not None:
            return why
        ours = BlockLayout.of(self.fingerprint, self.memory)
        theirs = BlockLayout.of(fingerprint, memory)
        problem = _implausible(memory, self.fingerprint)
        if isinstance(ours, str):
            raise InternalError(f"our own KV cache cannot be described: {ours}")
        if isinstance(theirs, str):
            differing.append(f"there {theirs}")
        elif problem is not None:
            differing.append(problem)
        elif not differing:
            heads = self.fingerprint.num_kv_heads
            pools = shards_in(self.memory, heads), shards_in(memory, heads)
            in_stages = [used for pool in pools if (used := used_slots(pool))]
            on_device = any(side.memory_type != "DRAM" for side in (memory, self.memory))
            mapping = Mapping.between(
                ours,
                theirs,
                on_device=on_device,
                state_blocks=self.state_blocks,
                by_head=bool(self.memory.shards or memory.shards),
                used_slots=in_stages[0] if in_stages else (),
            )
            if len(set(in_stages)) > 1:
                mapping = f"groups have {in_stages[0]} layers here and {in_stages[1]} there"
            if isinstance(mapping, Mapping):
                return mapping
            differing.append(mapping)
        return "the KV caches differ: " + "; ".join(differing)

    def check_destination(self, message: RegisterDestination, block_size: int, theirs: CacheMemory) -> str | None:
        """Returns why we cannot write to these destination blocks, which have the peer's size; None if we can."""
        if message.num_tokens < 1:
            return f"a transfer of {message.num_tokens} tokens"
        if len(message.token_hash) != 32:
            return f"a token hash of {len(message.token_hash)} bytes"
        if not 0 <= message.checksum_every <= MAX_EVERY:
            return f"a checksum for one of {message.checksum_every} grains"
        return self.check_table(message.num_tokens, message.first_block, message.block_ids, block_size, theirs)

    def check_table(
        self, num_tokens: int, first_block: list[int], block_ids: BlockTable, block_size: int, theirs: CacheMemory
    ) -> str | None:
        """Returns why `block_ids` cannot be a table of a request of `num_tokens` tokens in the peer's pool, each group
        from its `first_block` on; None if they can."""
        if not len(first_block) == len(block_ids) == self.num_groups:
            return f"{len(block_ids)} KV cache groups, expected {self.num_groups}"
        seen: set[int] = set()
        for group, (first, ids) in enumerate(zip(first_block, block_ids, strict=True)):
            total = -(-num_tokens // block_size)
            if self.state_blocks and group + 1 == self.num_groups:
                total = self.state_blocks
                if first or NULL_BLOCK_ID in ids:
                    return "states without all of their blocks"
            if first < 0 or first + len(ids) != total:
                return f"blocks {first} to {first + len(ids)} of {total}"
            for block in ids:
                if block == NULL_BLOCK_ID:
                    continue
                if not 0 < block < theirs.num_blocks:
                    return f"block {block} of a pool of {theirs.num_blocks}"
                if block in seen:
                    return f"block {block} twice"
                seen.add(block)
        return None if seen else "no blocks"


def layout_of(cache: KVCacheMemory) -> str:
    """Returns a block's axes, outermost first, by the strides of the tensor, whose axes after the block are AXES.
    Raises ConfigurationError for a cache with gaps."""
    sizes, strides = cache.tensor.shape[1:], cache.tensor.stride()[1:]
    order = sorted(range(len(AXES)), key=lambda axis: -strides[axis])
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected and sizes[axis] > 1:
            raise ConfigurationError("a KV cache whose blocks have gaps cannot be transferred")
        expected *= sizes[axis]
    if cache.tensor.stride()[0] != expected:
        raise ConfigurationError("a KV cache with gaps between its blocks cannot be transferred")
    return ",".join(AXES[axis] for axis in order)
