"""Which layers share a block table. Layers that keep the same tokens form one KV cache group; so do all that keep a
recurrent state."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class AttentionKind(enum.StrEnum):
    FULL = "full"  # every token is kept
    SLIDING = "sliding"  # only the last `window` tokens are ever read
    CHUNKED = "chunked"  # only those since the last multiple of `window` are
    STATE = "state"  # no token is kept: a state of all of them is


class KVCacheGroup(msgspec.Struct, frozen=True):
    """All groups draw from one block pool; a block of group g holds the KV of `layers` of that group."""

    kind: AttentionKind
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None  # tokens, counting the one that attends; only with SLIDING and CHUNKED
    blocks_per_request: int = 0  # however many tokens it has; only with STATE

    @property
    def keeps_every_token(self) -> bool:
        return self.kind is AttentionKind.FULL

    def first_read(self, position: Any) -> Any:
        """The first token that the one at `position` reads: a number, or an array of them. With a sliding window it may be below 0."""
        if self.window is None:
            return position * 0
        if self.kind is AttentionKind.CHUNKED:
            return position // self.window * self.window
        return position - self.window + 1
