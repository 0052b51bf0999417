"""The KV cache as it lies in memory: all of it, or what one of a node's ranks keeps in memory of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch


def flat_bytes(cache: torch.Tensor) -> torch.Tensor:
    """However its axes are ordered, a cache has no gaps: as storage it is one run of bytes."""
    import torch  # loaded already by what made the tensor

    return cache.as_strided((cache.numel(),), (1,)).view(torch.uint8)


def longest_word(num_bytes: int) -> torch.dtype:
    """Rows of so many bytes are copied fastest in words of this type."""
    import torch  # loaded already by what made the rows

    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if num_bytes % word.itemsize == 0)


class HeadShare(msgspec.Struct, frozen=True):
    """The heads that one of several ranks keeps, of all that there are. Others may keep the same ones."""

    first: int
    count: int
    total: int


class LayerShare(msgspec.Struct, frozen=True):
    """The layers that a rank of one pipeline stage keeps, by their slots in a block of all: for each group the first one's, and how many
    follow one another from there. In the rank's own blocks they lie from slot 0 on. `total`: the slots of a block of all layers."""

    of_group: tuple[tuple[int, int], ...]
    total: int

    @property
    def slots(self) -> int:
        """Of the rank's own blocks, which any group may get."""
        return max(count for _, count in self.of_group)


class KVCacheMemory(msgspec.Struct, frozen=True):
    """The KV cache as the worker half sees it.

    `tensor` is [num_blocks, slots, num_parts, num_kv_heads, block_size, head_dim], contiguous: all layers of a block lie
    side by side, so a whole block is one run of bytes and one descriptor. The parts are keys and values, or one of latents. Slot s holds layer s of its group. A view of
    memory with a block's axes in another order is as good, as long as there are no gaps in and between blocks.
    """

    tensor: torch.Tensor
    model: str  # its content's digest, not what it is called
    num_layers: int
    num_groups: int
    vocab_size: int  # token ids are below this
    has_windows: bool = False  # a running request may give up blocks that lie before its window
    # Above 0, the last group keeps recurrent states: so many blocks of a request hold what follows from all its tokens, as bytes.
    state_blocks: int = 0
    # Which heads the tensor has, where the node's other ranks keep the rest in memory of their own; None: it has all.
    heads: HeadShare | None = None
    # The same of layers, where each rank has those of one stage; only with `heads`.
    layers: LayerShare | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def slots(self) -> int:
        """Of the tensor."""
        return int(self.tensor.shape[1])

    @property
    def all_slots(self) -> int:
        """Of all stages."""
        return self.layers.total if self.layers is not None else self.slots

    @property
    def num_parts(self) -> int:
        return int(self.tensor.shape[2])

    @property
    def num_kv_heads(self) -> int:
        """Of the tensor."""
        return int(self.tensor.shape[3])

    @property
    def all_heads(self) -> int:
        """Of all ranks."""
        return self.heads.total if self.heads is not None else self.num_kv_heads

    @property
    def block_size(self) -> int:
        return int(self.tensor.shape[4])

    @property
    def head_dim(self) -> int:
        return int(self.tensor.shape[5])

    @property
    def block_bytes(self) -> int:
        return int(self.tensor[0].numel() * self.tensor.element_size())
