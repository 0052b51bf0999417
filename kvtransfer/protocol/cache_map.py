"""What our KV cache looks like, whether a peer's fits it, and which bytes of one are which bytes of the other. Nothing remote
is trusted before this.

The smallest thing that moves is a *grain*: as many tokens as the smaller of the two blocks has. One grain lies within
one block on either side. Its bytes are runs that are contiguous on both sides: a whole block where the blocks are the
same, else what the innermost axes have in common. All runs are equally long and lie at multiples of their length, so
that a run is named by one number: see `Move`. Where either cache lies in shards a run is of one head, and of one layer where the shards
are of pipeline stages (`shards`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.kvtransfer.base import NULL_BLOCK_ID, KVCacheMemory
from tandem.kvtransfer.protocol.commands import BlockTable
from tandem.kvtransfer.protocol.shards import shards_in, used_slots
from tandem.kvtransfer.protocol.transport import CutAxis, Move, Operation, UnitIds
from tandem.wire.errors import ConfigurationError, InternalError
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
        """What a node says of its blocks, or why that cannot be."""
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
        """Bytes from one index of an axis to the next."""
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
    """The runs of one grain, relative to the block's beginning, on both sides."""

    def __init__(
        self, ours: BlockLayout, theirs: BlockLayout, grain: int, *, by_slot: bool, by_head: bool
    ) -> None:
        mine, other = ours.strides(), theirs.strides()
        sizes = dict(ours.sizes, token=grain)
        run = ours.element_bytes
        inside: set[str] = set()
        # Axes belong to the run from the inside out, as long as both sides have them densely in the same order.
        for axis, other_axis in zip(reversed(ours.axes), reversed(theirs.axes), strict=True):
            if axis != other_axis or not mine[axis] == other[axis] == run:
                break
            if (by_slot and axis == "slot") or (by_head and axis == "head"):
                break
            inside.add(axis)
            run *= sizes[axis]
        self.bytes = run
        outside = [axis for axis in ours.axes if axis not in inside]
        # The slot first, so that a layer's runs are one row.
        outside.sort(key=lambda axis: (axis != "slot", ours.axes.index(axis)))
        self.ours = self._offsets(outside, sizes, mine)
        self.theirs = self._offsets(outside, sizes, other)

    def _offsets(self, axes: list[str], sizes: dict[str, int], strides: dict[str, int]) -> UnitIds:
        """[slots or 1, runs]: in units of a run."""
        offsets = np.zeros(1, dtype=np.int64)
        for axis in axes:
            steps = np.arange(sizes[axis], dtype=np.int64) * (strides[axis] // self.bytes)
            offsets = (offsets[:, None] + steps).reshape(-1)
        return offsets.reshape(sizes["slot"], -1) if "slot" in axes else offsets.reshape(1, -1)


class GrainPlace(msgspec.Struct, frozen=True):
    """Where one grain lies: a block of ours, one of theirs, and which of their grains it is. `group`: whose layers' it is."""

    our_block: int
    our_part: int
    their_block: int
    their_part: int
    group: int = 0


class Mapping:
    """Between our blocks and a peer's."""

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
        self.on_device = on_device  # either cache is
        # Either cache is in shards: what moves, and what is summed up, is of one head. And of one layer, where the shards are of stages:
        # then so many slots of each group have layers.
        self.heads = _cut_axis("head", ours, theirs) if by_head else None
        self.layers = _cut_axis("slot", ours, theirs) if used_slots else None
        self.used_slots = tuple(used_slots)
        # How many each request has in the last group. Each is a grain, the last ones to be sent: they are right once the whole prompt
        # is computed.
        self.state_blocks = state_blocks
        self.grain = min(ours.sizes["token"], theirs.sizes["token"])
        self.our_parts = ours.sizes["token"] // self.grain  # grains in a block
        self.their_parts = theirs.sizes["token"] // self.grain
        self._bytes = (ours.num_bytes, theirs.num_bytes)
        self._part_bytes = (
            ours.strides()["token"] * self.grain,
            theirs.strides()["token"] * self.grain,
        )
        self._whole = _Runs(ours, theirs, self.grain, by_slot=bool(used_slots), by_head=by_head)
        self._by_slot = _Runs(ours, theirs, self.grain, by_slot=True, by_head=by_head)
        self.grain_bytes = ours.num_bytes // self.our_parts
        self.runs_per_grain = int(self._whole.ours.size)

    @property
    def is_identity(self) -> bool:
        """Blocks are the same on both sides, byte by byte, and lie in one piece."""
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
        """Or why there is none."""
        mine, other = ours.sizes["token"], theirs.sizes["token"]
        if max(mine, other) % min(mine, other):
            return f"block_size is {mine} here and {other} there: one must be a multiple of the other"
        if ours.element_bytes != theirs.element_bytes:
            return f"an element has {ours.element_bytes} bytes here and {theirs.element_bytes} there"
        mapping = Mapping(
            ours,
            theirs,
            on_device=on_device,
            state_blocks=state_blocks,
            by_head=by_head,
            used_slots=used_slots,
        )
        if state_blocks and by_head:
            return "recurrent states are not handed over where a node's ranks keep their heads apart"
        if state_blocks and not mapping.is_identity:
            return "recurrent states are handed over between equal blocks alone: block_size or layout differ"
        return mapping

    def grains(self, num_tokens: int) -> int:
        """How many grains so many tokens take."""
        return -(-num_tokens // self.grain)

    def all_grains(self, num_tokens: int) -> int:
        """Includes states, which lie after the tokens."""
        return self.grains(num_tokens) + self.state_blocks

    def positions(
        self, num_tokens: int, first_block: Sequence[int], tables: BlockTable, parts: int
    ) -> list[tuple[int, int]]:
        """(group, index) of every grain of the request that has a block in these tables, whose blocks have `parts` grains each."""
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
        """Where in its group's table, as of a request's beginning, the block of a grain stands."""
        if self.is_state(group, num_groups):
            return index - self.grains(num_tokens)
        return index // parts

    def move(
        self,
        operation: Operation,
        transfer_id: str,
        places: Sequence[GrainPlace],
        slots: tuple[int, int] | None = None,
    ) -> Move:
        """All of these grains, or of each only the layers in slots `slots[0]` to `slots[1]`."""
        runs = self._whole if slots is None else self._by_slot
        where = np.array(
            [(place.our_block, place.our_part, place.their_block, place.their_part) for place in places],
            dtype=np.int64,
        )
        local, remote = (
            self._units(where[:, side], where[:, side + 1], offsets, side // 2, runs.bytes, slots)
            for side, offsets in ((0, runs.ours), (2, runs.theirs))
        )
        groups = None
        if self.layers is not None:
            groups = np.array([place.group for place in places], dtype=np.int64)
        grain_units = len(local) // len(places)
        return Move(
            operation, transfer_id, runs.bytes, local, remote, self.heads, grain_units, self.layers, groups
        )

    def _units(
        self,
        blocks: UnitIds,
        parts: UnitIds,
        offsets: UnitIds,
        side: int,
        run: int,
        slots: tuple[int, int] | None,
    ) -> UnitIds:
        if slots is not None:
            offsets = offsets[slots[0] : slots[1]]
        begins = blocks * (self._bytes[side] // run) + parts * (self._part_bytes[side] // run)
        units: UnitIds = (begins[:, None] + offsets.reshape(1, -1)).reshape(-1)
        return units


def _cut_axis(axis: str, ours: BlockLayout, theirs: BlockLayout) -> CutAxis:
    return CutAxis(ours.sizes[axis], ours.strides()[axis], theirs.strides()[axis])


MAX_BLOCKS = 1 << 22  # descriptors are made for each of a peer's blocks
MAX_DEVICES = 1024
MAX_SHARDS = 64
MAX_EVERY = 1 << 16  # one checksum for so many grains
ADDRESS_SPACE = 1 << 63
MAPPED = ("block_size", "layout")  # may differ, if Mapping.between finds a way
MAY_DIFFER = (*MAPPED, "wire_version")


def _implausible(memory: CacheMemory, fingerprint: CacheFingerprint) -> str | None:
    """Why there can be no such memory; None when there can."""
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
    """Every layer of a group has a slot of its own, from the first one on, and with each of them all heads are kept."""
    layers = 0
    for group in range(fingerprint.num_groups):
        ends = set()
        for shard in shards:
            first, count = shard.slots[group] if group < len(shard.slots) else (0, 0)
            if (
                len(shard.slots) != fingerprint.num_groups
                or not 0 <= first <= first + count <= fingerprint.num_slots
            ):
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
    has_windows: bool = False  # a running request may give up blocks that lie before its window
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
        """Between our blocks and the peer's; or why its KV bytes cannot become ours."""
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

    def check_destination(
        self, message: RegisterDestination, block_size: int, theirs: CacheMemory
    ) -> str | None:
        """Why these destination blocks, of the peer's size, cannot be written to; None when they can."""
        if message.num_tokens < 1:
            return f"a transfer of {message.num_tokens} tokens"
        if len(message.token_hash) != 32:
            return f"a token hash of {len(message.token_hash)} bytes"
        if not 0 <= message.checksum_every <= MAX_EVERY:
            return f"a checksum for one of {message.checksum_every} grains"
        return self.check_table(
            message.num_tokens, message.first_block, message.block_ids, block_size, theirs
        )

    def check_table(
        self,
        num_tokens: int,
        first_block: list[int],
        block_ids: BlockTable,
        block_size: int,
        theirs: CacheMemory,
    ) -> str | None:
        """Why `block_ids` are not blocks `first_block`... of a request of `num_tokens` in the peer's pool."""
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
    """A block's axes. Outermost first, by the strides of the tensor, which names them in the order of AXES after the block."""
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
