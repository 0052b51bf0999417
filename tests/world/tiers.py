"""The tiers of a node of the world: the product's, over the world's disk. Copies take their time on the world's clock, and touch the
device's blocks at one moment of it: a store when it begins or when it ends, a load when it ends."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.offload.cpu import Copier, CopyThread, CpuTier, QueuedCopy, TierSurroundings, Work
from tandem.kvtransfer.offload.disk import HEADER_BYTES, DiskTier
from tandem.kvtransfer.offload.manager import SlotManager
from tandem.kvtransfer.offload.spec import Copy, Mover, Tier
from tandem.kvtransfer.offload.worker_half import MakeExchange, halves_of
from tests.world.disk import WorldDisk
from tests.world.process import Process, Timer

LOOK_S = 0.5
HANGS_S = 0.25  # between two looks whether a disk answers again


@dataclasses.dataclass
class TierSetting:
    """Which tiers each node of a schedule has."""

    cpu_slots: int = 0
    disk_slots: int = 0
    policy: EvictionPolicy = EvictionPolicy.LRU
    block_factor: int = 1
    store_threshold: int = 0
    takes_s: tuple[float, float] = (0.0, 0.005)  # a copy, while its disk is well

    @property
    def exist(self) -> bool:
        return bool(self.cpu_slots or self.disk_slots)

    def configs(self, block_bytes: int) -> list[TierConfig]:
        size = block_bytes * self.block_factor
        common: dict[str, Any] = {
            "policy": self.policy,
            "block_factor": self.block_factor,
            "store_threshold": self.store_threshold,
        }
        configs = []
        if self.cpu_slots:
            configs.append(TierConfig(cpu=self.cpu_slots * size, **common))
        if self.disk_slots:
            configs.append(TierConfig(disk="/kv", size=self.disk_slots * (HEADER_BYTES + size), **common))
        return configs


def drawn_tiers(rng: random.Random) -> TierSetting:
    kind = rng.choice(["none", "none", "cpu", "disk", "disk", "both", "both"])
    setting = TierSetting(
        policy=rng.choice(list(EvictionPolicy)),
        block_factor=rng.choice([1, 1, 2]),
        store_threshold=rng.choice([0, 0, 0, 2]),
    )
    setting.takes_s = rng.choice([(0.0, 0.005), (0.02, 0.2)])
    if kind in ("cpu", "both"):
        setting.cpu_slots = rng.choice([6, 40, 100])
    if kind in ("disk", "both"):
        setting.disk_slots = rng.choice([8, 60, 150])
    return setting


class WorldCopies(CopyThread):
    """Does the work of the tier's thread on the world's clock."""

    def __init__(
        self,
        copier: Copier,
        wake: Callable[[], None],
        name: str,
        *,
        process: Process,
        disk: WorldDisk | None,
        takes_s: tuple[float, float],
        rng: random.Random,
        are_free: Callable[[Sequence[int]], int],
        on_broken: Callable[[str], None],
    ) -> None:
        self._process, self._disk, self._rng = process, disk, rng
        self._are_free, self._on_broken, self._takes_s = are_free, on_broken, takes_s
        self._busy = False
        self._under_way: Callable[[], None] | None = None  # its calls to the disk
        self._late: list[Callable[[], None]] = []
        self._timer = Timer(process, self._go_on)
        self._deadlines = Timer(process, self._look)
        process.on_end.append(self._on_end)
        super().__init__(copier, wake, name, process.clock)
        if disk is None:
            self.open()  # memory is there at once

    def _started(self) -> Sequence[Any]:
        return ()

    def await_open(self, timeout_s: float) -> bool:
        """The process waits for a disk only as long as it answers, because a start takes no time here."""
        if self._disk is not None and self._disk.weather.hangs:
            self._begin(self.open, 0.0)
        else:
            self.open()
        return self._is_open

    def open(self) -> None:
        # With a disk that fails at the start the node does not start, and is started again.
        if self._disk is not None:
            self._disk.is_calm = True
        try:
            super().open()
        finally:
            if self._disk is not None:
                self._disk.is_calm = False
        self._timer.within(0.0)

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        super().submit(stores, loads)
        self._timer.within(0.0)
        self._deadlines.within(LOOK_S)

    def do_first(self, work: Callable[[], None]) -> None:
        super().do_first(work)
        self._timer.within(0.0)

    def leave_out(self, why: str) -> None:
        super().leave_out(why)
        self._timer.within(0.0)

    def _look(self) -> float | None:
        self.look()
        return LOOK_S if self._loads or self._stores or self._current is not None else None

    # ── the work ──

    def _go_on(self) -> float | None:
        if self._busy or not self._is_open:
            return None
        work, wait_s = self.take()
        if work is None:
            return wait_s
        seconds = self._rng.uniform(*self._takes_s)
        if self._disk is not None:
            seconds += self._rng.uniform(*self._disk.weather.takes_s)
        if isinstance(work, QueuedCopy) and not work.is_load and self._rng.random() < 0.7:
            # Its bytes are read now, and reach the disk when the time is over
            right = self._store(work)
            self._begin(lambda: self._end_store(work, right), seconds)
        else:
            self._begin(lambda: self._do_now(work), seconds)
        return None

    def _begin(self, work: Callable[[], None], seconds: float) -> None:
        self._busy, self._under_way = True, work
        self._process.later(seconds, self._end_work)

    def _end_work(self) -> None:
        if self._disk is not None and self._disk.weather.hangs:
            self._process.later(HANGS_S, self._end_work)
            return
        work, self._busy, self._under_way = self._under_way, False, None
        if work is not None:
            work()
        self._timer.within(0.0)

    def _store(self, work: QueuedCopy) -> bool | None:
        self._check(work)
        if self._disk is None:
            return self.copy(work)
        self._disk.begin_store()
        try:
            return self.copy(work)
        finally:
            self._late = self._disk.end_store()

    def _end_store(self, work: QueuedCopy, right: bool | None) -> None:
        late, self._late = self._late, []
        for write in late:
            write()
        self.end(work, right)

    def _do_now(self, work: Work) -> None:
        if isinstance(work, QueuedCopy):
            self._check(work)
        self.do(work)

    def _check(self, work: QueuedCopy) -> None:
        if self._current is work and self._are_free(work.job.blocks):
            what = "a load of a tier lands in" if work.is_load else "a store of a tier reads"
            self._on_broken(f"{what} free blocks of {self._process.name}")

    def _on_end(self) -> None:
        """The process ends: what it does with its disk now is done in part."""
        disk = self._disk
        if disk is None:
            return
        for write in self._late[: self._rng.randint(0, len(self._late))]:
            write()
        self._late = []
        if self._under_way is not None and self._is_open and not disk.weather.hangs:
            disk.end_inside(self._under_way, self._rng.randint(0, 4))
        disk.release(self._process)


def _slots(tier: Tier) -> SlotManager:
    manager: Any = tier.manager
    slots = getattr(manager, "_manager", manager)  # beneath a filter
    assert isinstance(slots, SlotManager)
    return slots


class NodeTiers:
    """What a schedule looks at in the tiers of a node."""

    def __init__(
        self,
        context: ConnectorContext,
        block_bytes: int,
        setting: TierSetting,
        process: Process,
        disk: WorldDisk,
        rng: random.Random,
        are_free: Callable[[Sequence[int]], int],
        on_broken: Callable[[str], None],
        make_exchange: MakeExchange,
    ) -> None:
        self.tiers: list[Tier] = []
        self._process, self._on_broken = process, on_broken

        def copying(of: WorldDisk | None) -> Callable[..., CopyThread]:
            def make(copier: Copier, wake: Callable[[], None], name: str) -> CopyThread:
                return WorldCopies(
                    copier,
                    wake,
                    name,
                    process=process,
                    disk=of,
                    takes_s=setting.takes_s,
                    rng=rng,
                    are_free=are_free,
                    on_broken=on_broken,
                )

            return make

        for config in setting.configs(block_bytes):
            spec = (
                CpuTier(config, TierSurroundings(copying(None)))
                if config.cpu
                else DiskTier(config, TierSurroundings(copying(disk), disk.files_of(process)))
            )
            self.tiers.append(Tier(spec, config.block_factor))
        self.halves: list[tuple[SchedulerConnector, WorkerConnector]] = halves_of(
            self.tiers, context, process.clock, make_exchange
        )

    def await_no_copy(self, places: Iterable[int]) -> int:
        """How many of these places of the tier in memory no copy may be written to."""
        tier = next(tier for tier in self.tiers if isinstance(tier.spec, CpuTier))
        return sum(not _slots(tier)._is_written(place // tier.block_factor) for place in places)

    def check_integrity(self) -> None:
        for tier in self.tiers:
            _slots(tier).check_integrity()

    def check_idle(self) -> None:
        """Nothing is under way, so every slot has been let go."""
        for tier in self.tiers:
            if tier.sharing is not None:
                tier.sharing.turn()  # an idle node takes none, so that what it lent is still lent
            if any(_slots(tier).busy):
                self._on_broken(f"slots of the {tier.spec.name} tier of {self._process.name} are never let go")

    @property
    def have_to_forget(self) -> bool:
        """Whether a disk does not know yet what its tier has forgotten."""
        return any(mover.has_first for mover in self.movers if isinstance(mover, CopyThread))

    @property
    def copied_bytes(self) -> int:
        """From other nodes' tiers."""
        shared = [tier.sharing for tier in self.tiers if tier.sharing is not None]
        return sum(sharing.fetched_bytes + sharing.mirrored_bytes for sharing in shared)

    @property
    def movers(self) -> list[Mover]:
        return [tier.mover for tier in self.tiers]

    @property
    def loaded_bytes(self) -> int:
        return sum(mover.loaded_bytes for mover in self.movers)

    @property
    def stored_bytes(self) -> int:
        return sum(mover.stored_bytes for mover in self.movers)
