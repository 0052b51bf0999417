"""The KV cache as units: gathers them into one run of bytes before they are sent, and scatters them when they
arrive."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tandem.kvtransfer.base import flat_bytes, longest_word
from tandem.kvtransfer.protocol.transport import UnitIds

MAX_MOVE_BYTES = 64 << 20  # twice the most that the protocol posts at once


class CacheUnits:
    """The units of this node's KV cache. All pairs share it; it has no state but the memory."""

    def __init__(self, cache: torch.Tensor, block_bytes: int) -> None:
        self.device = cache.device
        self.block_bytes = block_bytes
        self.num_bytes = cache.shape[0] * block_bytes
        self._bytes = flat_bytes(cache)

    def problem(self, unit_bytes: int, units: Sequence[int]) -> str | None:
        """Returns why the cache cannot have these units, which a peer has named; None if it has them."""
        if not units or not 0 < unit_bytes <= self.block_bytes or len(units) * unit_bytes > MAX_MOVE_BYTES:
            return f"{len(units)} units of {unit_bytes} bytes"
        if min(units) < 0 or (max(units) + 1) * unit_bytes > self.num_bytes:
            return f"units {min(units)} to {max(units)} of a pool of {self.num_bytes // unit_bytes}"
        return None

    def blocks_of(self, unit_bytes: int, units: Sequence[int]) -> set[int]:
        first = np.asarray(units, dtype=np.int64) * unit_bytes
        return set((first // self.block_bytes).tolist()) | set(((first + unit_bytes - 1) // self.block_bytes).tolist())

    def gather(self, unit_bytes: int, units: UnitIds, staging: torch.Tensor) -> torch.Tensor:
        """Copies the units side by side into `staging`, and returns that part of it."""
        rows, words = self._rows(unit_bytes), len(units) * unit_bytes
        into = staging[:words]
        ids = torch.from_numpy(units).to(self.device)
        torch.index_select(rows, 0, ids, out=into.view(rows.dtype).view(len(units), -1))
        return into

    def scatter(self, unit_bytes: int, units: UnitIds, data: torch.Tensor) -> None:
        rows = self._rows(unit_bytes)
        ids = torch.from_numpy(units).to(self.device)
        rows.index_copy_(0, ids, data.view(rows.dtype).view(len(units), -1))

    def _rows(self, unit_bytes: int) -> torch.Tensor:
        """Returns the cache as [units, words]."""
        whole = self.num_bytes // unit_bytes * unit_bytes
        return self._bytes[:whole].view(longest_word(unit_bytes)).view(self.num_bytes // unit_bytes, -1)


class StagingBuffer:
    """One pair's memory between the cache and the network, and on a device the pair's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        cuda: Any = torch.cuda
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None

    def room(self, num_bytes: int) -> torch.Tensor:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def finish(self) -> None:
        """Waits until the device has done everything that was queued on the stream."""
        if self._stream is not None:
            self._stream.synchronize()


class WriteVerdict(enum.Enum):
    """What becomes of a write that has arrived."""

    COPIED = enum.auto()  # its transfer goes on, and the blocks are its own
    DROPPED = enum.auto()  # its transfer has ended here
    FOREIGN = enum.auto()  # its transfer goes on, and some of the blocks are not its own


class BlockGate:
    """Says which of our blocks a peer may write to, for each transfer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, frozenset[int]] = {}

    def expect(self, transfer_id: str, blocks: Sequence[int]) -> None:
        with self._lock:
            self._open[transfer_id] = frozenset(blocks)

    def expect_no_more(self, transfer_id: str) -> None:
        """Returns when no write for the transfer can come any more. Waits for a copy that is running: milliseconds."""
        with self._lock:
            self._open.pop(transfer_id, None)

    @contextlib.contextmanager
    def landing(self, transfer_id: str, blocks: set[int]) -> Iterator[WriteVerdict]:
        """Yields what a write into these blocks may do; the answer holds while the context is open."""
        with self._lock:
            expected = self._open.get(transfer_id)
            if expected is None:
                yield WriteVerdict.DROPPED
            else:
                yield WriteVerdict.COPIED if blocks <= expected else WriteVerdict.FOREIGN
