"""Checksums of blocks: the producer takes them, the consumer compares them before it uses what came.

Both sides number the grains of a transfer alike, in the order in which they are sent. A sample is every n-th of them and
the last, begun at a place that the tokens' hash says, so that both know which without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.cache_map import Mapping
from tandem.kvtransfer.protocol.shards import HeadRange, givers_of
from tandem.kvtransfer.protocol.transport import AskedSums, HeadSums

if TYPE_CHECKING:
    import torch

SAMPLE_EVERY = 16
CHECKSUM_BYTES = 8
# Rows that are multiplied at once on a device, in bytes.
_BATCH_BYTES = 32 << 20


def every_of(policy: ChecksumPolicy, *, is_doubtful: bool) -> int:
    """One of how many grains is checked; 0 for none. From a peer that sent a wrong one, all are."""
    if policy is ChecksumPolicy.SAMPLE and is_doubtful:
        policy = ChecksumPolicy.ALL
    return {ChecksumPolicy.ALL: 1, ChecksumPolicy.SAMPLE: SAMPLE_EVERY}.get(policy, 0)


class ChecksumSample(msgspec.Struct, frozen=True):
    """Which of a transfer's grains carry a checksum, by their place in the order in which they are sent."""

    every: int  # one of so many; 0: none
    offset: int
    last: int

    @classmethod
    def of(cls, grains: int, every: int, token_hash: bytes) -> ChecksumSample:
        return cls(every, token_hash[0] % every if every else 0, grains - 1)

    def __contains__(self, place: object) -> bool:
        return bool(self.every) and (place == self.last or place % self.every == self.offset)  # type: ignore[operator]

    def between(self, start: int, end: int) -> list[int]:
        return [place for place in range(start, end) if place in self] if self.every else []


def pack(sums: Sequence[int]) -> bytes:
    return np.array(sums, dtype="<u8").tobytes()


def unpack(packed: bytes) -> list[int]:
    """What does not divide is cut off; the number of checksums is compared by the caller."""
    whole = len(packed) // CHECKSUM_BYTES * CHECKSUM_BYTES
    sums: list[int] = np.frombuffer(packed[:whole], dtype="<u8").tolist()
    return sums


class PendingSums(NamedTuple):
    """Checksums of which other ranks are still taking their part. One of the two is called, once."""

    wait: Callable[[], list[int]]  # raises TransferError when another rank's part cannot be summed up
    forget: Callable[[], None]


class Checksums(Protocol):
    def of(
        self, blocks: Sequence[int], parts: Sequence[int], mapping: Mapping, *, arrived: bool = False
    ) -> list[int]:
        """For grain `parts[i]` of block `blocks[i]` of our cache. The same bytes give the same number at both ends of
        `mapping`, whatever the order in which a block's axes lie in memory, and whatever ranks its heads are with. `arrived`: of what a
        peer sent, so that every rank's copy of a head counts, and not only the one that is given away. Raises TransferError when another
        rank's part cannot be summed up."""
        ...

    def begin(
        self, blocks: Sequence[int], parts: Sequence[int], mapping: Mapping, *, arrived: bool = False
    ) -> PendingSums:
        """The same, without waiting for what other ranks have to do before: they copy blocks meanwhile, and so may this one."""
        ...


def _nothing_elsewhere(*_: object) -> AskedSums:
    return AskedSums()


SumsElsewhere = Callable[[Sequence[int], Sequence[int], int, bool], AskedSums]


def combined(ranks: Sequence[HeadSums], *, arrived: bool) -> list[int]:
    """One checksum for each grain, of the sums that all ranks have of their heads. Of what has `arrived` all copies of a head must be
    the same; one that differs is summed up as well, so that the number is another."""
    shards = [HeadRange(rank.first, rank.sums.shape[1]) for rank in ranks]
    givers = givers_of(shards)
    heads = [ranks[giver].sums[:, head - shards[giver].first] for head, giver in enumerate(givers.tolist())]
    given = np.stack(heads, axis=1).astype("<u8")
    found = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(row).data) for row in given]
    if arrived:
        for rank, shard in zip(ranks, shards, strict=True):
            differs = (rank.sums != given[:, shard.first : shard.end]).any(axis=1)
            for grain in np.flatnonzero(differs).tolist():
                row = np.concatenate([given[grain], rank.sums[grain]]).astype("<u8")
                found[grain] = xxhash.xxh3_64_intdigest(row.data)
    return found


class CacheChecksums:
    """In host memory XXH3. Where either cache is on a device, a sum that the device computes where the bytes are: each word
    times an odd number that grows with its place, modulo 2**64. One changed bit changes it.

    Where either cache is in shards, each head has such a sum of its own, and the grain's is XXH3 of those. `elsewhere` asks other ranks
    for the sums of their heads, as `Transport.sums_elsewhere` does."""

    def __init__(self, memory: KVCacheMemory, elsewhere: SumsElsewhere = _nothing_elsewhere) -> None:
        tensor = memory.tensor
        self._first_head = memory.heads.first if memory.heads is not None else 0
        self._elsewhere = elsewhere
        self._tensor = tensor
        self._block_size = memory.block_size
        self._block_bytes = memory.block_bytes
        self._rows: npt.NDArray[np.uint8] | None = None
        self._elements: npt.NDArray[Any] | None = None  # in host memory, a block's heads first
        self._weights: torch.Tensor | None = None
        self._stream: Any = None
        if not tensor.is_cuda:
            self._rows = flat_bytes(tensor).numpy().reshape(memory.num_blocks, memory.block_bytes)

    def of(
        self, blocks: Sequence[int], parts: Sequence[int], mapping: Mapping, *, arrived: bool = False
    ) -> list[int]:
        return self.begin(blocks, parts, mapping, arrived=arrived).wait()

    def begin(
        self, blocks: Sequence[int], parts: Sequence[int], mapping: Mapping, *, arrived: bool = False
    ) -> PendingSums:
        if mapping.heads is None:
            sums = self._of_whole(blocks, parts, mapping)
            return PendingSums(lambda: sums, AskedSums().forget)
        asked = self._elsewhere(blocks, parts, mapping.grain, mapping.on_device)
        mine = self.of_heads(blocks, parts, mapping.grain, on_device=mapping.on_device)
        return PendingSums(lambda: combined([mine, *asked.wait()], arrived=arrived), asked.forget)

    def _of_whole(self, blocks: Sequence[int], parts: Sequence[int], mapping: Mapping) -> list[int]:
        if mapping.on_device:
            return self._weighted(blocks, parts, mapping.grain)
        if self._rows is not None and mapping.is_identity:
            return [xxhash.xxh3_64_intdigest(self._rows[block].data) for block in blocks]
        return [
            xxhash.xxh3_64_intdigest(self._grain(block, part, mapping.grain).numpy().data)
            for block, part in zip(blocks, parts, strict=True)
        ]

    def of_heads(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, *, on_device: bool
    ) -> HeadSums:
        """The same of each head that this rank keeps."""
        if on_device:
            sums = self._weighted(blocks, parts, grain, by_head=True)
        else:
            sums = [
                xxhash.xxh3_64_intdigest(of_head.data)
                for block, part in zip(blocks, parts, strict=True)
                for of_head in self._grain_by_head(block, part, grain)
            ]
        return HeadSums(self._first_head, np.array(sums, dtype=np.uint64).reshape(len(blocks), -1))

    def _grain_by_head(self, block: int, part: int, size: int) -> npt.NDArray[Any]:
        """For each head its bytes, in the order of `cache_map.AXES`."""
        if self._elements is None:
            import torch

            # NumPy has no type for some of torch's: their bytes are what counts.
            kinds = {kind.itemsize: kind for kind in (torch.uint8, torch.int16, torch.int32, torch.int64)}
            elements = self._tensor.view(kinds[self._tensor.dtype.itemsize])
            self._elements = elements.numpy().transpose(0, 3, 1, 2, 4, 5)
        return np.ascontiguousarray(self._elements[block][..., part * size : (part + 1) * size, :])

    def _grain(self, block: int, part: int, size: int) -> torch.Tensor:
        """Its bytes, in the order of `cache_map.AXES`."""
        import torch

        grain = self._tensor[block][..., part * size : (part + 1) * size, :]
        return grain.contiguous().view(-1).view(torch.uint8)

    def _weighted(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, *, by_head: bool = False
    ) -> list[int]:
        """One for each grain, or for each head of it."""
        import torch

        batch = max(1, _BATCH_BYTES // self._block_bytes)
        sums: list[int] = []
        with self._own_stream():
            for start in range(0, len(blocks), batch):
                chosen = slice(start, start + batch)
                words = self._words(blocks[chosen], parts[chosen], grain, by_head=by_head)
                if self._weights is None or len(self._weights) < words.shape[1]:
                    # Odd, and spread over all 64 bits: 2**64 divided by the golden ratio.
                    places = torch.arange(words.shape[1], dtype=torch.int64, device=words.device)
                    self._weights = (2 * places + 1) * -7046029254386353131
                total = (words * self._weights[: words.shape[1]]).sum(1).tolist()
                sums += [value % (1 << 64) for value in total]
        return sums

    def _words(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, *, by_head: bool
    ) -> torch.Tensor:
        """[grains, words], or [grains times heads, words]: a copy, in the order of `cache_map.AXES`."""
        import torch

        device = self._tensor.device
        grains = self._tensor.index_select(0, torch.tensor(blocks, device=device))
        if grain < self._block_size:
            split = grains.reshape(
                *grains.shape[:4], self._block_size // grain, grain, grains.shape[5]
            ).movedim(4, 1)
            grains = split[torch.arange(len(parts), device=device), torch.tensor(parts, device=device)]
        if by_head:
            grains = grains.movedim(3, 1).flatten(0, 1)
        raw = grains.contiguous().view(len(grains), -1).view(torch.uint8)
        sizes = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
        return raw.view(next(kind for kind, size in sizes if raw.shape[1] % size == 0)).to(torch.int64)

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """What is read here is complete. On the engine's stream it would wait for the next forward pass."""
        if not self._tensor.is_cuda:
            return contextlib.nullcontext()
        import torch

        cuda: Any = torch.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self._tensor.device)
        stream: contextlib.AbstractContextManager[Any] = cuda.stream(self._stream)
        return stream
