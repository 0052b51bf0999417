"""Describes a KV cache in memory: the whole cache, or the part that one of a node's ranks keeps in its own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch


def flat_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Returns the cache as one run of bytes, in the order of its storage. A cache has no gaps, whatever the order of
    its axes."""
    import torch  # the caller has loaded it to make the tensor

    return cache.as_strided((cache.numel(),), (1,)).view(torch.uint8)


def fence_after(tensor: torch.Tensor) -> Any:
    """An event after everything that the device has been given so far; None for a tensor in host memory."""
    if not tensor.is_cuda:
        return None
    import torch  # the caller has loaded it to make the tensor

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def longest_word(num_bytes: int) -> torch.dtype:
    """Returns the element type that copies rows of `num_bytes` bytes fastest: the widest that divides them."""
    import torch  # the caller has loaded it to make the rows

    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if num_bytes % word.itemsize == 0)


class HeadShare(msgspec.Struct, frozen=True):
    """The heads that one of several ranks keeps, out of `total`. Other ranks may keep some of them, too."""

    first: int
    count: int
    total: int


class LayerShare(msgspec.Struct, frozen=True):
    """The layers that a rank of one pipeline stage keeps.

    `of_group` has for each group the slot of its first layer in a block of all layers, and how many layers follow from
    there. In the rank's own blocks they begin at slot 0. `total`: the slots of a block of all layers.
    """

    of_group: tuple[tuple[int, int], ...]
    total: int

    @property
    def slots(self) -> int:
        """The slots of the rank's own blocks. Any group may get such a block, so they are as many as the largest
        needs."""
        return max(count for _, count in self.of_group)


class KVCacheMemory(msgspec.Struct, frozen=True):
    """The KV cache as the worker half sees it.

    `tensor` is [num_blocks, slots, num_parts, num_kv_heads, block_size, head_dim], contiguous: all layers of a block
    lie side by side, so a whole block is one run of bytes and one descriptor. The parts are keys and values, or one
    part of latents. Slot s holds layer s of the block's group. The tensor may be a view of memory in which a block's
    axes have another order, if there are no gaps in and between blocks. On torch's meta device it is a shape alone: the
    node's ranks are all other processes, and keep the heads in their memory.
    """

    tensor: torch.Tensor
    model: str  # the digest of the model's content, not its name
    num_layers: int
    num_groups: int
    vocab_size: int  # token ids are below this
    has_windows: bool = False  # a running request may give up blocks that lie before its window
    # Above 0, the last group keeps recurrent states: each request has this many of its blocks, which hold the states
    # after all its tokens, as bytes.
    state_blocks: int = 0
    # The heads in this tensor, if the node's other ranks keep the rest in their own memory; None: it has all.
    heads: HeadShare | None = None
    # The layers in this tensor, if each rank keeps those of one stage; only with `heads`.
    layers: LayerShare | None = None

    @property
    def is_elsewhere(self) -> bool:
        return bool(self.tensor.is_meta)

    @property
    def num_blocks(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def slots(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def all_slots(self) -> int:
        """The slots of a block of all stages' layers."""
        return self.layers.total if self.layers is not None else self.slots

    @property
    def num_parts(self) -> int:
        return int(self.tensor.shape[2])

    @property
    def num_kv_heads(self) -> int:
        return int(self.tensor.shape[3])

    @property
    def all_heads(self) -> int:
        """The heads that all ranks keep together."""
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
