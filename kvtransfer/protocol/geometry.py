"""What our KV cache looks like, and whether what a peer says fits it. Nothing remote is trusted before this."""

from __future__ import annotations

import msgspec

from tandem.kvtransfer.base import NULL_BLOCK_ID, KVCacheMemory
from tandem.kvtransfer.protocol.commands import BlockTable
from tandem.kvtransfer.protocol.mapping import AXES, BlockLayout, Mapping
from tandem.wire.errors import ConfigurationError, InternalError
from tandem.wire.handoff import CacheFingerprint, CacheMemory, RegisterDestination

MAX_BLOCKS = 1 << 22  # descriptors are made for each of a peer's blocks
MAX_DEVICES = 1024
MAX_EVERY = 1 << 16  # one checksum for so many grains
ADDRESS_SPACE = 1 << 63
MAPPED = ("block_size", "layout")  # may differ, if Mapping.between finds a way


def _implausible(memory: CacheMemory) -> str | None:
    """Why there can be no such memory; None when there can."""
    if not 1 < memory.num_blocks <= MAX_BLOCKS:
        return f"the other cache has {memory.num_blocks} blocks"
    end = memory.base_address + memory.num_blocks * memory.block_bytes
    if memory.base_address <= 0 or end > ADDRESS_SPACE or not 0 <= memory.device_id < MAX_DEVICES:
        return f"the other cache cannot lie at {memory.base_address:#x} of device {memory.device_id}"
    return None


class PoolGeometry(msgspec.Struct, frozen=True):
    fingerprint: CacheFingerprint
    memory: CacheMemory
    block_size: int
    num_groups: int
    vocab_size: int  # token ids are below this
    has_windows: bool = False  # a running request may give up blocks that lie before its window

    @classmethod
    def of(cls, cache: KVCacheMemory, memory: CacheMemory, connector: str) -> PoolGeometry:
        return cls(
            fingerprint=CacheFingerprint(
                model=cache.model,
                dtype=str(cache.tensor.dtype).removeprefix("torch."),
                num_layers=cache.num_layers,
                num_kv_heads=cache.num_kv_heads,
                head_dim=cache.head_dim,
                block_size=cache.block_size,
                layout=",".join(_axes_of(cache)),
                connector=connector,
                num_slots=cache.slots,
                num_groups=cache.num_groups,
            ),
            memory=memory,
            block_size=cache.block_size,
            num_groups=cache.num_groups,
            vocab_size=cache.vocab_size,
            has_windows=cache.has_windows,
        )

    def mapping_to(self, fingerprint: CacheFingerprint, memory: CacheMemory) -> Mapping | str:
        """Between our blocks and the peer's; or why its KV bytes cannot become ours."""
        differing = [
            f"{field} is {getattr(self.fingerprint, field)!r} here and {getattr(fingerprint, field)!r} there"
            for field in CacheFingerprint.__struct_fields__
            if field not in MAPPED and getattr(self.fingerprint, field) != getattr(fingerprint, field)
        ]
        ours = BlockLayout.of(self.fingerprint, self.memory)
        theirs = BlockLayout.of(fingerprint, memory)
        problem = _implausible(memory)
        if isinstance(ours, str):
            raise InternalError(f"our own KV cache cannot be described: {ours}")
        if isinstance(theirs, str):
            differing.append(f"there {theirs}")
        elif problem is not None:
            differing.append(problem)
        elif not differing:
            on_device = any(side.memory_type != "DRAM" for side in (memory, self.memory))
            mapping = Mapping.between(ours, theirs, on_device=on_device)
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
        total = -(-num_tokens // block_size)
        seen: set[int] = set()
        for first, ids in zip(first_block, block_ids, strict=True):
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


def _axes_of(cache: KVCacheMemory) -> list[str]:
    """Outermost first, by the strides of the tensor, which names them in the order of AXES behind the block."""
    sizes, strides = cache.tensor.shape[1:], cache.tensor.stride()[1:]
    order = sorted(range(len(AXES)), key=lambda axis: -strides[axis])
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected and sizes[axis] > 1:
            raise ConfigurationError("a KV cache whose blocks have gaps cannot be transferred")
        expected *= sizes[axis]
    if cache.tensor.stride()[0] != expected:
        raise ConfigurationError("a KV cache with gaps between its blocks cannot be transferred")
    return [AXES[axis] for axis in order]
