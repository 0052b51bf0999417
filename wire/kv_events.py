"""Events of a node's KV cache, block by block, in the form that vLLM 0.32 publishes, so that its subscribers can read ours:
an event is a map with its `type`, and a batch an array. Older subscribers expect events to be arrays, too.
"""

from __future__ import annotations

import msgspec

# The blocks of the device, whatever it is. A tier's medium is its name in capital letters.
DEVICE_MEDIUM = "GPU"

ExtraKeys = tuple[str, ...]
# An extra key that begins like this is a cache salt. Outside the node it is a digest of the salt.
SALT = "salt:"


# vLLM's classes have no defaults for these fields, so they are always written. msgspec leaves out a default, but not what a
# function made.
def _nothing() -> None:
    return None


def _device() -> str:
    return DEVICE_MEDIUM


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="BlockStored"):
    """These blocks can be found from now on. Each is the next one's parent. A tier's event has only hashes: the
    device's event had the tokens and the rest of what made them."""

    block_hashes: list[bytes]
    # The hash of the block before the first one; None for a prompt's first block, and in events of tiers.
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_nothing)
    medium: str | None = msgspec.field(default_factory=_device)
    lora_name: str | None = msgspec.field(default_factory=_nothing)
    # For each block, what made its hash besides its tokens. None: nothing.
    extra_keys: list[ExtraKeys | None] | None = None
    group_idx: int | None = None  # the KV cache group; None if there is only one


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """The medium has no copy of these blocks any more."""

    block_hashes: list[bytes]
    medium: str | None = msgspec.field(default_factory=_device)
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """The device and every tier are empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int | None = None
