"""The tier in host memory: a pool of slots, and a thread that copies.

If the cache is in host memory, the thread copies with memmove. On CUDA it has streams of its own and page-locked
memory: a store begins when the device has done what was queued before it, and the thread waits for that. The CUDA
path has not run on a GPU yet.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import dataclasses
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.memory import fence_after
from tandem.kvtransfer.offload.files import Files, SystemFiles
from tandem.kvtransfer.offload.manager import SlotManager, TierManager, filtered
from tandem.kvtransfer.offload.patience import PROBE_S, Absence, GivenUp, Hold, TierUnavailable
from tandem.kvtransfer.offload.spec import Copy, Mover
from tandem.kvtransfer.protocol.transport import runs_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
_LOOK_S = 0.5  # between two looks at deadlines while there are copies


@dataclasses.dataclass(frozen=True, slots=True)
class TierSurroundings:
    """What a tier needs of its process. A simulation brings its own."""

    copying: Callable[[Copier, Callable[[], None], str], CopyThread] = dataclasses.field(
        default_factory=lambda: CopyThread
    )
    files: Files = dataclasses.field(default_factory=SystemFiles)


def create(config: TierConfig) -> CpuTier:
    return CpuTier(config)


class CpuTier:
    name = "cpu"

    def __init__(self, config: TierConfig, around: TierSurroundings | None = None) -> None:
        self._config = config
        self._around = around or TierSurroundings()

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
        return manager, self._around.copying(copier, wake, self.name)

    def places(self) -> torch.Tensor:
        """Returns the pool in blocks of the device's size, with as many axes. Callers must not keep it: the tier
        gives the memory back when it ends."""
        return self._places()


class Copier(abc.ABC):
    """Copies between the device's blocks and a pool of places of the same size."""

    def __init__(self, memory: KVCacheMemory) -> None:
        self._tensor = memory.tensor  # keeps the memory alive
        self.block_bytes = memory.block_bytes

    def fence(self) -> Any:
        """Called in the step thread. A store that gets the returned fence may read everything computed so far."""
        return fence_after(self._tensor)

    def open(self) -> None:
        """Called first, in the thread that copies. It may take long: the tier is left out meanwhile. If it raises TierUnavailable, it is
        called again later."""

    @abc.abstractmethod
    def copy(self, job: Copy, to_device: bool, fence: Any, hold: Hold) -> bool:
        """Returns when all bytes are copied; False if some are missing or wrong. Touches the device's blocks only in
        `with hold`, and does nothing there that can hang, such as a call to a disk. If it raises TierUnavailable, the tier is left out."""

    def probe(self) -> bool:
        """Tries a small read and write. Returns whether the tier works."""
        return True

    def close(self) -> None:
        """Called when no copy is running, and none will be."""


class HostCopier(Copier):
    def __init__(self, memory: KVCacheMemory, num_places: int) -> None:
        super().__init__(memory)
        self._device = memory.tensor.data_ptr()
        # The kernel gives memory to a page only when it is written.
        self._pool = mmap.mmap(-1, num_places * self.block_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel has no huge pages
                self._pool.madvise(mmap.MADV_HUGEPAGE)
        self._places = ctypes.addressof(ctypes.c_char.from_buffer(self._pool))

    def copy(self, job: Copy, to_device: bool, fence: Any, hold: Hold) -> bool:
        size = self.block_bytes
        with hold:
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
        self._blocks: torch.Tensor = flat_bytes(memory.tensor).view(memory.num_blocks, -1)
        self._pool = torch.empty((num_places, self.block_bytes), dtype=torch.uint8, pin_memory=True)
        self._streams = {
            to_device: torch.cuda.Stream(memory.tensor.device)  # type: ignore[no-untyped-call]
            for to_device in (True, False)
        }

    def places(self) -> torch.Tensor:
        return self._pool.view(-1, 1, 1, 1, 1, self.block_bytes)

    def copy(self, job: Copy, to_device: bool, fence: Any, hold: Hold) -> bool:
        stream = self._streams[to_device]
        if fence is not None:
            stream.wait_event(fence)
        with hold, self._cuda.stream(stream):
            for block, place, count in runs_of(job.blocks, job.places):
                blocks, places = self._blocks[block : block + count], self._pool[place : place + count]
                if to_device:
                    blocks.copy_(places, non_blocking=True)
                else:
                    places.copy_(blocks, non_blocking=True)
            stream.synchronize()
        return True


@dataclasses.dataclass(slots=True, eq=False)
class QueuedCopy:
    job: Copy
    fence: Any
    is_load: bool
    until: float
    hold: Hold = dataclasses.field(default_factory=Hold)


Work = QueuedCopy | Callable[[], None]


class CopyThread(Mover):
    """One thread makes the copies in the order of submission, but loads before stores. Another one gives up those whose
    time is over, because the first may be in a call that does not return."""

    given_up = 0

    def __init__(
        self, copier: Copier, wake: Callable[[], None], name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._copier = copier
        self._wake = wake
        self._clock = clock
        lock = threading.RLock()  # guards the fields from here on
        self._changed = threading.Condition(lock)
        self._to_watch = threading.Condition(lock)
        self._watches = False
        self._loads: deque[QueuedCopy] = deque()
        self._stores: deque[QueuedCopy] = deque()
        self._first: deque[Callable[[], None]] = deque()
        self._current: QueuedCopy | None = None
        self._ended: dict[int, bool | None] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._stored_blocks = 0
        self._loaded_blocks = 0
        self._absence = Absence(name, clock)
        self._is_open = False
        self._is_late = False  # it was awaited in vain
        self._rests = False  # the thread that copies waits for something to do
        self._threads = self._started()

    def _started(self) -> Sequence[threading.Thread]:
        """Has the copier opened and the copies made: the first thread does that."""
        threads = [
            threading.Thread(target=self._run, name="kv-tier", daemon=True),
            threading.Thread(target=self._watch_deadlines, name="kv-tier-watch", daemon=True),
        ]
        for thread in threads:
            thread.start()
        return threads

    # ── what the step thread calls ──

    def await_open(self, timeout_s: float) -> bool:
        """Returns whether the copier is open: not if that takes longer, or cannot be done now. Raises what its `open` raised otherwise."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._failure is not None or self._absence.why, timeout_s)
            if self._failure is not None:
                raise self._failure
            self._is_late = not self._is_open
            return self._is_open

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        fence = self._copier.fence() if stores else None
        with self._changed:
            now = self._clock()
            queued = [QueuedCopy(job, None, True, now + job.within_s) for job in loads]
            self._loads += queued
            self._stores += [QueuedCopy(job, fence, False, now + job.within_s) for job in stores]
            if self.left_out:
                self._drop_queued()
            self._changed.notify_all()
            if not self._watches:
                self._to_watch.notify()

    def do_first(self, work: Callable[[], None]) -> None:
        """Has the thread do this before any other copy. If it raises OSError, the tier is left out until it does not."""
        with self._changed:
            self._first.append(work)
            self._changed.notify_all()

    @property
    def has_first(self) -> bool:
        """Whether something of `do_first` is not done yet."""
        return bool(self._first)

    def take_ended(self) -> dict[int, bool | None]:
        if self._failure is not None and self._is_open:
            raise InternalError("the thread that copies KV to and from a tier died") from self._failure
        if not self._ended:  # read without the lock: a copy that ends now is taken the next time
            return {}
        with self._changed:
            ended, self._ended = self._ended, {}
        return ended

    def leave_out(self, why: str) -> None:
        with self._changed:
            if not self.left_out:
                self._leave_out(why)
            self._changed.notify_all()

    @property
    def left_out(self) -> str:
        if not self._is_open:
            return self._absence.why or "its disk has not answered since the start"
        return self._absence.why

    @property
    def stored_bytes(self) -> int:
        return self._stored_blocks * self._copier.block_bytes

    @property
    def loaded_bytes(self) -> int:
        return self._loaded_blocks * self._copier.block_bytes

    # ── deadlines ──

    def _watch_deadlines(self) -> None:
        with self._changed:
            while not self._closing:
                self._watches = bool(self._loads or self._stores or self._current is not None)
                self._to_watch.wait(_LOOK_S if self._watches else None)
                self.look()

    def look(self) -> None:
        """Gives up the copies whose time is over."""
        with self._changed:
            now, current = self._clock(), self._current
            for store in [queued for queued in self._stores if queued.until <= now]:
                self._stores.remove(store)
                self._give_up(store)
            late_copy = current is not None and current.until <= now
            late_load = any(queued.until <= now for queued in self._loads)
            if (late_load or late_copy) and not self.left_out:
                what = "load" if late_load or (current is not None and current.is_load) else "store"
                self._leave_out(f"a {what} was not done in its time")
            if late_copy and current is not None and current.hold.give_up():
                self._current = None
                self._give_up(current)

    def _leave_out(self, why: str) -> None:
        self._absence.leave_out(why)
        self._drop_queued()

    def _drop_queued(self) -> None:
        for queued in (*self._loads, *self._stores):
            self._give_up(queued)
        self._loads.clear()
        self._stores.clear()

    def _give_up(self, queued: QueuedCopy) -> None:
        self.given_up += 1
        self._ended[queued.job.job] = None
        self._wake()

    # ── the thread that copies ──

    def _run(self) -> None:
        try:
            if self._opened():
                while (work := self._next()) is not None:
                    self.do(work)
        except BaseException as error:
            if not self._is_open and self._is_late:
                logger.error("a tier that was not open in time cannot be opened: %s", error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._wake()

    def _opened(self) -> bool:
        """Returns when the copier is open, or False when the tier is closed before that."""
        while True:
            try:
                self.open()
                return True
            except TierUnavailable as error:
                with self._changed:
                    self._absence.leave_out(str(error))
                    self._changed.notify_all()
                    while not self._closing and (left := self._absence.until - self._clock()) > 0:
                        self._changed.wait(left)
                    if self._closing:
                        return False

    def open(self) -> None:
        self._copier.open()
        with self._changed:
            self._is_open = True
            if self._absence.why:
                self._absence.end()
            self._changed.notify_all()

    def _next(self) -> Work | None:
        with self._changed:
            while True:
                work, wait_s = self.take()
                if work is not None or self._closing:
                    return work
                self._rests = True
                self._changed.wait(wait_s)
                self._rests = False

    def take(self) -> tuple[Work | None, float | None]:
        """Returns what is to be done now. If that is nothing, also in how many seconds something is; None: when something new comes."""
        with self._changed:
            if self._absence.why:
                left = self._absence.until - self._clock()
                if self._closing:
                    return self._first[0] if self._first else None, None
                return (self._probe, None) if left <= 0 else (None, left)
            if self._first:
                return self._first[0], None
            queue = self._loads or self._stores
            if self._closing or not queue:
                return None, None
            self._current = queue.popleft()
            self._changed.notify_all()
            return self._current, None

    def do(self, work: Work) -> None:
        """Does what `take` has returned."""
        if isinstance(work, QueuedCopy):
            self.end(work, self.copy(work))
        else:
            self._do(work)

    def copy(self, queued: QueuedCopy) -> bool | None:
        """Returns whether every byte is right; None: it was given up, and touches the device's blocks no more."""
        try:
            return self._copier.copy(queued.job, queued.is_load, queued.fence, queued.hold)
        except GivenUp:
            return None
        except TierUnavailable as error:
            with self._changed:
                if self._current is queued and not self.left_out:
                    self._leave_out(str(error))
            return None

    def _do(self, work: Callable[[], None]) -> None:
        problem = ""
        try:
            work()
        except OSError as error:
            problem = error.strerror or str(error)
        with self._changed:
            if problem:
                self._leave_out(problem)
                if self._closing:
                    self._first.clear()
            elif self._first and self._first[0] is work:
                self._first.popleft()
        self._wake()

    def _probe(self) -> None:
        began = self._clock()
        while self._first:
            self._first[0]()
            self._first.popleft()
        works = self._copier.probe()
        with self._changed:
            if works and self._clock() - began <= PROBE_S:
                self._absence.end()
            else:
                self._leave_out("a small read and write did not succeed in a second")

    def end(self, queued: QueuedCopy, right: bool | None) -> None:
        """The copy has been made, and this is what `copy` has returned."""
        with self._changed:
            if self._current is not queued:
                return  # it was given up meanwhile
            self._current = None
            if queued.is_load and right is not None:
                self._absence.loaded_in_time()
            if right and queued.is_load:
                self._loaded_blocks += len(queued.job.blocks)
            elif right:
                self._stored_blocks += len(queued.job.blocks)
            elif right is None or not queued.is_load:  # the scheduler counts failed loads
                self.given_up += 1
            self._ended[queued.job.job] = right
            self._changed.notify_all()
        self._wake()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            hangs = bool(self.left_out) and not self._first and not self._rests
            self._changed.notify_all()
            self._to_watch.notify_all()
        for thread in self._threads[:1]:
            if thread.is_alive():
                thread.join(0.0 if hangs else STOP_GRACE_S)
                if not thread.is_alive():
                    self._copier.close()
