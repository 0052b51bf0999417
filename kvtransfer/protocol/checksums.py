"""Checksums of blocks. The producer computes them, and the consumer compares them before it uses what arrived.

Both sides number a transfer's grains alike, in the order of sending. A sample is every n-th grain and the last one. The
token hash says at which grain it begins, so both sides know the sample without a message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.cache_map import Mapping
from tandem.kvtransfer.protocol.shards import givers_of, part_of
from tandem.kvtransfer.protocol.transport import AskedSums, ShardSums

if TYPE_CHECKING:
    import torch

SAMPLE_EVERY = 16
CHECKSUM_BYTES = 8
# Bytes of the rows that are multiplied at once on a device.
_BATCH_BYTES = 32 << 20


def every_of(policy: ChecksumPolicy, *, is_doubtful: bool) -> int:
    """Returns n if one of n grains is checked; 0 for none. A peer that sent wrong bytes has all its grains checked."""
    if policy is ChecksumPolicy.SAMPLE and is_doubtful:
        policy = ChecksumPolicy.ALL
    return {ChecksumPolicy.ALL: 1, ChecksumPolicy.SAMPLE: SAMPLE_EVERY}.get(policy, 0)


class ChecksumSample(msgspec.Struct, frozen=True):
    """Which of a transfer's grains carry a checksum, by their place in the order of sending."""

    every: int  # one grain of this many carries one; 0: none does
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
    """Returns the checksums. Cuts off an incomplete one: the caller compares their number."""
    whole = len(packed) // CHECKSUM_BYTES * CHECKSUM_BYTES
    sums: list[int] = np.frombuffer(packed[:whole], dtype="<u8").tolist()
    return sums


class PendingSums(NamedTuple):
    """Checksums of which other ranks are still computing their part. The caller calls one of the two, once."""

    wait: Callable[[], list[int]]  # raises TransferError if another rank's part does not come
    forget: Callable[[], None]


class Checksums(Protocol):
    def of(
        self,
        blocks: Sequence[int],
        parts: Sequence[int],
        mapping: Mapping,
        *,
        groups: Sequence[int] = (),
        arrived: bool = False,
    ) -> list[int]:
        """Returns a checksum for each grain `parts[i]` of block `blocks[i]` of our cache, which is of group
        `groups[i]`.

        The same bytes give the same number at both ends of `mapping`, whatever the order of a block's axes in memory,
        and whichever ranks keep its heads. `arrived`: a peer sent the bytes, so every rank's copy of a head counts, and
        not only the copy that is sent on. Waits for other ranks. Raises TransferError if another rank's part does not
        come.
        """

    def begin(
        self,
        blocks: Sequence[int],
        parts: Sequence[int],
        mapping: Mapping,
        *,
        groups: Sequence[int] = (),
        arrived: bool = False,
    ) -> PendingSums:
        """As `of`, without waiting for other ranks. They may copy blocks first, and so may this rank meanwhile."""


SumsElsewhere = Callable[[Sequence[int], Sequence[int], int, bool, bool], AskedSums]


def combined(
    ranks: Sequence[ShardSums], groups: Sequence[int], used_slots: Sequence[int], *, arrived: bool
) -> list[int]:
    """Returns one checksum for each grain, from the sums that each rank has of its part of it.

    `used_slots`: if the sums are of each layer, in how many slots a block of each group has layers; `groups` then has
    each grain's group. In bytes that have `arrived`, all copies of a head must be the same: a copy that differs goes
    into the checksum, too, so that it becomes another number.
    """
    if not used_slots:
        return _combined(ranks, 0, 1, arrived=arrived)
    found = np.zeros(len(groups), dtype=np.uint64)
    for group in set(groups):
        rows = np.flatnonzero(np.array(groups) == group)
        of_group = [ShardSums(rank.part, rank.sums[rows]) for rank in ranks]
        found[rows] = _combined(of_group, group, used_slots[group], arrived=arrived)
    sums: list[int] = found.tolist()
    return sums


def _combined(ranks: Sequence[ShardSums], group: int, num_slots: int, *, arrived: bool) -> list[int]:
    givers = givers_of([rank.part for rank in ranks], group, num_slots)
    given = np.zeros((len(ranks[0].sums), *givers.shape), dtype="<u8")
    own = []  # for each rank: its sums of such a block, and where they belong in the whole block's
    for number, (part, sums) in enumerate(ranks):
        kept, heads = part.slots_of(group, num_slots), part.heads
        own.append((sums[:, : kept.count], np.s_[:, kept.first : kept.end, heads.first : heads.end]))
        slots, of_slot = np.nonzero(givers == number)
        given[:, slots, of_slot] = sums[:, slots - kept.first, of_slot - heads.first]
    found = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(row).data) for row in given]
    if arrived:
        for sums, where in own:
            differs = (sums != given[where]).any(axis=(1, 2))
            for grain in np.flatnonzero(differs).tolist():
                row = np.concatenate([given[grain].reshape(-1), sums[grain].reshape(-1)]).astype("<u8")
                found[grain] = xxhash.xxh3_64_intdigest(row.data)
    return found


_HeadsOf = Literal["block", "layer"] | None


class CacheChecksums:
    """Checksums of our KV cache.

    In host memory they are XXH3. If either cache is on a device, the device computes a sum where the bytes are: each
    word times an odd number that grows with its place, modulo 2**64. One changed bit changes the sum.

    If either cache is in shards, each head has a sum of its own (each head of each layer, if the shards belong to
    stages), and the grain's checksum is XXH3 of these. `elsewhere` asks other ranks for the sums of their part, as
    `Transport.sums_elsewhere` does.
    """

    def __init__(self, memory: KVCacheMemory, elsewhere: SumsElsewhere = lambda *_: AskedSums()) -> None:
        tensor = memory.tensor
        self._part = part_of(memory)
        self._elsewhere = elsewhere
        self._tensor = tensor
        self._block_size = memory.block_size
        self._block_bytes = memory.block_bytes
        self._rows: npt.NDArray[np.uint8] | None = None
        self._elements: npt.NDArray[Any] | None = None  # in host memory, a block's heads first
        self._weights: torch.Tensor | None = None
        self._stream: Any = None
        self._is_elsewhere = memory.is_elsewhere
        if not tensor.is_cuda and not self._is_elsewhere:
            self._rows = flat_bytes(tensor).numpy().reshape(memory.num_blocks, memory.block_bytes)

    def of(
        self,
        blocks: Sequence[int],
        parts: Sequence[int],
        mapping: Mapping,
        *,
        groups: Sequence[int] = (),
        arrived: bool = False,
    ) -> list[int]:
        return self.begin(blocks, parts, mapping, groups=groups, arrived=arrived).wait()

    def begin(
        self,
        blocks: Sequence[int],
        parts: Sequence[int],
        mapping: Mapping,
        *,
        groups: Sequence[int] = (),
        arrived: bool = False,
    ) -> PendingSums:
        if mapping.heads is None:
            sums = self._of_whole(blocks, parts, mapping)
            return PendingSums(lambda: sums, AskedSums().forget)
        by_layer, used = mapping.layers is not None, mapping.used_slots
        asked = self._elsewhere(blocks, parts, mapping.grain, mapping.on_device, by_layer)
        mine = []
        if not self._is_elsewhere:
            mine = [self.of_heads(blocks, parts, mapping.grain, on_device=mapping.on_device, by_layer=by_layer)]
        return PendingSums(lambda: combined([*mine, *asked.wait()], groups, used, arrived=arrived), asked.forget)

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
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, *, on_device: bool, by_layer: bool = False
    ) -> ShardSums:
        """Returns this rank's sums of each grain: one for each of its heads, or for each head of each layer."""
        if on_device:
            sums = self._weighted(blocks, parts, grain, heads_of="layer" if by_layer else "block")
        else:
            sums = [
                xxhash.xxh3_64_intdigest(of_head.data)
                for block, part in zip(blocks, parts, strict=True)
                for of_head in self._grain_by_head(block, part, grain, by_layer)
            ]
        of_heads = np.array(sums, dtype=np.uint64).reshape(len(blocks), -1, self._part.heads.count)
        return ShardSums(self._part, of_heads)

    def _grain_by_head(
        self, block: int, part: int, size: int, by_layer: bool
    ) -> Sequence[npt.NDArray[Any]] | npt.NDArray[Any]:
        """Returns each head's bytes, in the order of `cache_map.AXES`. With `by_layer`: each head's of the first layer,
        then of the second ..."""
        if self._elements is None:
            import torch

            # NumPy lacks some of torch's types. Only the bytes matter here.
            kinds = {kind.itemsize: kind for kind in (torch.uint8, torch.int16, torch.int32, torch.int64)}
            elements = self._tensor.view(kinds[self._tensor.dtype.itemsize])
            self._elements = elements.numpy().transpose(0, 3, 1, 2, 4, 5)
        elements = self._elements[block][..., part * size : (part + 1) * size, :]
        if not by_layer:
            return np.ascontiguousarray(elements)
        in_order = np.ascontiguousarray(elements.swapaxes(0, 1))
        return in_order.reshape(-1, *in_order.shape[2:])

    def _grain(self, block: int, part: int, size: int) -> torch.Tensor:
        """Returns the grain's bytes, in the order of `cache_map.AXES`."""
        import torch

        grain = self._tensor[block][..., part * size : (part + 1) * size, :]
        return grain.contiguous().view(-1).view(torch.uint8)

    def _weighted(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, *, heads_of: _HeadsOf = None
    ) -> list[int]:
        """Returns one sum for each grain, or for each head of it, or for each head of each layer."""
        import torch

        batch = max(1, _BATCH_BYTES // self._block_bytes)
        sums: list[int] = []
        with self._own_stream():
            for start in range(0, len(blocks), batch):
                chosen = slice(start, start + batch)
                words = self._words(blocks[chosen], parts[chosen], grain, heads_of=heads_of)
                if self._weights is None or len(self._weights) < words.shape[1]:
                    # Odd multiples of an odd number, spread over all 64 bits: it is 2**64 divided by the golden ratio.
                    places = torch.arange(words.shape[1], dtype=torch.int64, device=words.device)
                    self._weights = (2 * places + 1) * -7046029254386353131
                total = (words * self._weights[: words.shape[1]]).sum(1).tolist()
                sums += [value % (1 << 64) for value in total]
        return sums

    def _words(self, blocks: Sequence[int], parts: Sequence[int], grain: int, *, heads_of: _HeadsOf) -> torch.Tensor:
        """Returns a copy in the order of `cache_map.AXES`: [grains, words], or with a row for each head."""
        import torch

        device = self._tensor.device
        grains = self._tensor.index_select(0, torch.tensor(blocks, device=device))
        if grain < self._block_size:
            split = grains.reshape(*grains.shape[:4], self._block_size // grain, grain, grains.shape[5]).movedim(4, 1)
            grains = split[torch.arange(len(parts), device=device), torch.tensor(parts, device=device)]
        if heads_of == "block":
            grains = grains.movedim(3, 1).flatten(0, 1)
        elif heads_of == "layer":
            grains = grains.movedim(3, 2).flatten(0, 2)
        raw = grains.contiguous().view(len(grains), -1).view(torch.uint8)
        sizes = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
        return raw.view(next(kind for kind, size in sizes if raw.shape[1] % size == 0)).to(torch.int64)

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream of our own: the bytes that are read here are complete, and the engine's stream would make them wait
        for the next forward pass."""
        if not self._tensor.is_cuda:
            return contextlib.nullcontext()
        import torch

        cuda: Any = torch.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self._tensor.device)
        stream: contextlib.AbstractContextManager[Any] = cuda.stream(self._stream)
        return stream
