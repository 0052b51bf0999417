"""What our KV cache looks like, and whether what a peer says fits it. Nothing remote is trusted before this."""

from __future__ import annotations

import msgspec

from kvtransfer.base import NULL_BLOCK_ID, KVCacheMemory
from kvtransfer.protocol.commands import BlockTable
from wire.handoff import CacheFingerprint, CacheMemory, RegisterDestination

MAX_BLOCKS = 1 << 24  # descriptors are made for each of a peer's blocks
MAX_DEVICES = 1024
ADDRESS_SPACE = 1 << 63


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
                layout=f"block,slot[{cache.slots}],kv,head,token,dim in {cache.num_groups} groups",
                connector=connector,
            ),
            memory=memory,
            block_size=cache.block_size,
            num_groups=cache.num_groups,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def difference(self, fingerprint: CacheFingerprint, memory: CacheMemory) -> str | None:
        """Why the peer's KV bytes do not mean here what they mean there; None when they do."""
        differing = [
            f"{field} is {getattr(self.fingerprint, field)!r} here and {getattr(fingerprint, field)!r} there"
            for field in CacheFingerprint.__struct_fields__
            if getattr(self.fingerprint, field) != getattr(fingerprint, field)
        ]
        if memory.block_bytes != self.memory.block_bytes:
            differing.append(
                f"a block has {self.memory.block_bytes} bytes here and {memory.block_bytes} there"
            )
        else:
            problem = _implausible(memory)
            if problem is not None:
                differing.append(problem)
        return "the KV caches differ: " + "; ".join(differing) if differing else None

    def check_destination(self, message: RegisterDestination, theirs: CacheMemory) -> str | None:
        """Why these destination blocks cannot be written to; None when they can."""
        if message.num_tokens < 1:
            return f"a transfer of {message.num_tokens} tokens"
        if len(message.token_hash) != 32:
            return f"a token hash of {len(message.token_hash)} bytes"
        return self.check_table(message.num_tokens, message.first_block, message.block_ids, theirs)

    def check_table(
        self, num_tokens: int, first_block: list[int], block_ids: BlockTable, theirs: CacheMemory
    ) -> str | None:
        """Why `block_ids` are not blocks `first_block`... of a request of `num_tokens` in the peer's pool."""
        if not len(first_block) == len(block_ids) == self.num_groups:
            return f"{len(block_ids)} KV cache groups, expected {self.num_groups}"
        total = self.num_blocks_for(num_tokens)
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
