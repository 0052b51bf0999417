"""Which layers share a block table. Layers that keep the same tokens form one KV cache group; so do all that keep a
recurrent state."""

from __future__ import annotations

import enum

import msgspec


class AttentionKind(enum.StrEnum):
    FULL = "full"  # every token is kept
    SLIDING = "sliding"  # only the last `window` tokens are ever read
    STATE = "state"  # no token is kept: a state of all of them is


class KVCacheGroup(msgspec.Struct, frozen=True):
    """All groups draw from one block pool; a block of group g holds the KV of `layers` of that group."""

    kind: AttentionKind
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None  # tokens, counting the one that attends; only with SLIDING
    blocks_per_request: int = 0  # however many tokens it has; only with STATE

    @property
    def keeps_every_token(self) -> bool:
        return self.kind is AttentionKind.FULL
