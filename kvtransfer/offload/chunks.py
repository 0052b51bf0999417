"""Copies between the device's blocks and chunks of host memory, for tiers whose bytes come and go through such chunks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.offload.cpu import Copier
from tandem.kvtransfer.offload.patience import Hold
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.spec import Copy

if TYPE_CHECKING:
    import torch

Places = Sequence[tuple[int, int]]
"""Blocks of the device, and the place of each: see `Copy`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The host memory of `block_factor` blocks, in three forms."""

    tensor: torch.Tensor
    rows: Any  # the same as a numpy array
    bytes: memoryview


class ChunkCopier(Copier):
    def __init__(self, memory: KVCacheMemory, block_factor: int) -> None:
        super().__init__(memory)
        self._factor = block_factor
        self._blocks: torch.Tensor = flat_bytes(memory.tensor).view(memory.num_blocks, -1)
        self._on_device = memory.tensor.is_cuda
        # In host memory numpy copies, because torch would use more threads for it.
        self._rows: Any = None if self._on_device else self._blocks.numpy()

    def new_chunk(self) -> Chunk:
        import torch

        tensor = torch.empty((self._factor, self.block_bytes), dtype=torch.uint8)
        rows: Any = tensor.numpy()
        return Chunk(tensor, rows, memoryview(rows).cast("B"))

    def chunks_of(self, job: Copy) -> Iterator[tuple[Key, int, Places]]:
        parts = itertools.groupby(zip(job.blocks, job.places, strict=True), key=lambda pair: pair[1] // self._factor)
        for key, (slot, pairs) in zip(job.keys, parts, strict=True):
            yield key, slot, list(pairs)

    def gather(self, chunk: Chunk, places: Places, hold: Hold) -> None:
        with hold:
            for block, place in places:
                if self._on_device:
                    chunk.tensor[place % self._factor].copy_(self._blocks[block])
                else:
                    chunk.rows[place % self._factor] = self._rows[block]

    def scatter(self, chunk: Chunk, places: Places, hold: Hold) -> None:
        with hold:
            for block, place in places:
                if self._on_device:
                    self._blocks[block].copy_(chunk.tensor[place % self._factor])
                else:
                    self._rows[block] = chunk.rows[place % self._factor]
            if self._on_device:
                import torch

                torch.cuda.synchronize(self._blocks.device)
