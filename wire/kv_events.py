"""What happens to a node's KV cache, block by block: in the shape that vLLM publishes, so that its subscribers can read ours.

A field's place is its name here: arrays travel, not maps. New fields go to the end.
"""

from __future__ import annotations

import msgspec

# The device's own blocks, whatever the device. A tier's medium is its name in capital letters.
DEVICE_MEDIUM = "GPU"

ExtraKeys = tuple[str, ...]


class BlockStored(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"
):
    """Blocks that can be found from now on, each the next one's parent. A tier says only which: tokens, and what else made the hash, came
    when the device stored them."""

    block_hashes: list[bytes]
    parent_block_hash: (
        bytes | None
    )  # of the block before the first; None for a prompt's first block, and from tiers
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE_MEDIUM
    lora_name: str | None = None
    # For each block what besides its tokens made its hash. None: nothing.
    extra_keys: list[ExtraKeys | None] | None = None
    group_idx: int | None = None  # the KV cache group; None when there is one


class BlockRemoved(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"
):
    """No copy of these is left in the medium."""

    block_hashes: list[bytes]
    medium: str | None = DEVICE_MEDIUM
    group_idx: int | None = None


class AllBlocksCleared(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"
):
    """The device and every tier are empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int | None = None
