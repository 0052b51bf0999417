"""The tier in host memory: a pool of slots, and a thread that copies.

If the cache is in host memory, the thread copies with memmove. On CUDA it has streams of its own and page-locked
memory: a store begins when the device has done what was queued before it, and the thread waits for that. The CUDA
path has not run on a GPU yet.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload.manager import SlotManager, TierManager, filtered
from tandem.kvtransfer.offload.spec import Copy, Mover
from tandem.kvtransfer.protocol.transport import runs_of
from tandem.wire.errors import ConfigurationError, InternalError

if TYPE_CHECKING:
    import torch

STOP_GRACE_S = 5.0
# A copy of the largest prompt takes a second. After this long without an end, the thread counts as hung.
PATIENCE_S = 60.0


def create(config: TierConfig) -> CpuTier:
    return CpuTier(config)


class CpuTier:
    name = "cpu"

    def __init__(self, config: TierConfig) -> None:
        self._config = config

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        config = self._config
        slot_bytes = memory.block_bytes * config.block_factor
        num_slots = (config.cpu or 0) // slot_bytes
        if num_slots < 1:
            raise ConfigurationError(
                f"cache.tiers: {config.cpu} bytes of cpu have no room for {config.block_factor} of this model's blocks, "
                f"which are {memory.block_bytes} bytes each"
            )
        manager = filtered(SlotManager(num_slots, config.policy), config.store_threshold)
        pooled = CudaCopier if memory.tensor.is_cuda else HostCopier
        copier = pooled(memory, num_slots * config.block_factor)
        self._places = copier.places
        return manager, CopyThread(copier, wake)

    def places(self) -> torch.Tensor:
        """Returns the pool in blocks of the device's size, with as many axes. Callers must not keep it: the tier
        gives the memory back when it ends."""
        return self._places()


class Copier(abc.ABC):
    """Copies between the device's blocks and a pool of places of the same size."""

    def __init__(self, memory: KVCacheMemory) -> None:
        self.block_bytes = memory.block_bytes

    def fence(self) -> Any:
        """Called in the step thread. A store that gets the returned fence may read everything computed so far."""
        return None

    @abc.abstractmethod
    def copy(self, job: Copy, to_device: bool, fence: Any) -> bool:
        """Returns when all bytes are copied; False if some are missing or wrong."""

    def close(self) -> None:
        """Called when no copy is running, and none will be."""


class HostCopier(Copier):
    def __init__(self, memory: KVCacheMemory, num_places: int) -> None:
        super().__init__(memory)
        self._tensor = memory.tensor  # keeps the memory alive
        self._device = memory.tensor.data_ptr()
        # The kernel gives memory to a page only when it is written.
        self._pool = mmap.mmap(-1, num_places * self.block_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel has no huge pages
                self._pool.madvise(mmap.MADV_HUGEPAGE)
        self._places = ctypes.addressof(ctypes.c_char.from_buffer(self._pool))

    def copy(self, job: Copy, to_device: bool, fence: Any) -> bool:
        size = self.block_bytes
        for block, place, count in runs_of(job.blocks, job.places):
            device, host = self._device + block * size, self._places + place * size
            # ctypes releases Python's lock, so the step goes on meanwhile.
            ctypes.memmove(*((device, host) if to_device else (host, device)), count * size)
        return True

    def places(self) -> torch.Tensor:
        import torch

        pool = torch.frombuffer(self._pool, dtype=torch.uint8)
        return pool.view(-1, 1, 1, 1, 1, self.block_bytes)

    def close(self) -> None:
        self._pool.close()


class CudaCopier(Copier):
    def __init__(self, memory: KVCacheMemory, num_places: int) -> None:
        import torch

        super().__init__(memory)
        self._cuda = torch.cuda
        self._device = memory.tensor.device
        self._blocks: torch.Tensor = flat_bytes(memory.tensor).view(memory.num_blocks, -1)
        self._pool = torch.empty((num_places, self.block_bytes), dtype=torch.uint8, pin_memory=True)
        self._streams = {
            to_device: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for to_device in (True, False)
        }

    def places(self) -> torch.Tensor:
        return self._pool.view(-1, 1, 1, 1, 1, self.block_bytes)

    def fence(self) -> Any:
        event = self._cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._cuda.current_stream(self._device))
        return event

    def copy(self, job: Copy, to_device: bool, fence: Any) -> bool:
        stream = self._streams[to_device]
        if fence is not None:
            stream.wait_event(fence)
        with self._cuda.stream(stream):
            for block, place, count in runs_of(job.blocks, job.places):
                blocks, places = self._blocks[block : block + count], self._pool[place : place + count]
                if to_device:
                    blocks.copy_(places, non_blocking=True)
                else:
                    places.copy_(blocks, non_blocking=True)
        stream.synchronize()
        return True


class CopyThread(Mover):
    """One thread makes the copies in the order of submission, but loads before stores, and first those that `wait`
    waits for."""

    def __init__(self, copier: Copier, wake: Callable[[], None]) -> None:
        self._copier = copier
        self._wake = wake
        self._changed = threading.Condition()  # guards the fields from here on
        self._loads: deque[tuple[Copy, Any]] = deque()
        self._stores: deque[tuple[Copy, Any]] = deque()
        self._under_way: set[int] = set()  # queued or being copied
        self._ended: dict[int, bool] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._stored_blocks = 0
        self._loaded_blocks = 0
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)
        self._thread.start()

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        fence = self._copier.fence() if stores else None
        with self._changed:
            self._loads += [(job, None) for job in loads]
            self._stores += [(job, fence) for job in stores]
            self._under_way.update(job.job for job in (*stores, *loads))
            self._changed.notify_all()

    def take_ended(self) -> dict[int, bool]:
        if self._failure is not None:
            raise InternalError("the thread that copies KV to and from a tier died") from self._failure
        if not self._ended:  # read without the lock: a copy that ends now is taken the next time
            return {}
        with self._changed:
            ended, self._ended = self._ended, {}
        return ended

    def wait(self, jobs: Iterable[int]) -> None:
        """Moves these stores to the front of the queue, and waits. Raises InternalError after PATIENCE_S."""
        wanted = set(jobs)
        until = time.monotonic() + PATIENCE_S
        with self._changed:
            self._stores = deque(sorted(self._stores, key=lambda queued: queued[0].job not in wanted))
            while not self._under_way.isdisjoint(wanted):
                if self._failure is not None:
                    raise InternalError(
                        "the thread that copies KV to and from a tier died"
                    ) from self._failure
                if not self._changed.wait(max(until - time.monotonic(), 0)) and time.monotonic() >= until:
                    raise InternalError(f"copies to a tier did not end within {PATIENCE_S:g} s")

    @property
    def stored_bytes(self) -> int:
        return self._stored_blocks * self._copier.block_bytes

    @property
    def loaded_bytes(self) -> int:
        return self._loaded_blocks * self._copier.block_bytes

    def _run(self) -> None:
        try:
            while (queued := self._next()) is not None:
                job, fence, is_load = queued
                self._end(job, is_load, self._copier.copy(job, is_load, fence))
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._wake()

    def _next(self) -> tuple[Copy, Any, bool] | None:
        with self._changed:
            while not self._closing:
                if self._loads:
                    return (*self._loads.popleft(), True)
                if self._stores:
                    return (*self._stores.popleft(), False)
                self._changed.wait()
        return None

    def _end(self, job: Copy, is_load: bool, right: bool) -> None:
        with self._changed:
            if is_load:
                self._loaded_blocks += len(job.blocks)
            else:
                self._stored_blocks += len(job.blocks)
            self._under_way.remove(job.job)
            self._ended[job.job] = right
            self._changed.notify_all()
        self._wake()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(STOP_GRACE_S)
            if not self._thread.is_alive():
                self._copier.close()
