"""The tiers and disks of a schedule, and what happens to them. Everything here is drawn from a generator of its own."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from tests.world.disk import DiskWeather, WorldDisk
from tests.world.tiers import TierSetting, drawn_tiers

if TYPE_CHECKING:
    from tests.world.node import WorldNode
    from tests.world.schedule import Schedule


LONGEST_TURN = 90  # an answer of 45 tokens still fits


@dataclasses.dataclass(frozen=True)
class Asked:
    prompt: list[int]
    salt: str | None
    job: str | None = None


def _drawing(seed: int) -> random.Random:
    return random.Random(f"storage {seed}")


def tiers_of(seed: int) -> TierSetting:
    return drawn_tiers(_drawing(seed))


class Storage:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.rng = rng = _drawing(schedule.outcome.seed)
        self.tiers = drawn_tiers(rng)
        if schedule.features.has_states:
            self.tiers.block_factor = 1  # others are refused for such a model
        self._is_shared = rng.random() < 0.3  # all nodes have their files in one folder
        self._disks: dict[str, WorldDisk] = {}
        self._asked: list[Asked] = []
        self.asks_again = self.has_tiers or schedule.features.has_jobs

    @property
    def has_tiers(self) -> bool:
        return self.tiers.exist

    def asked(self, prompt: list[int], salt: str | None) -> Asked:
        """What is asked: this prompt, or perhaps an earlier one again, or its next turn."""
        rng = self.rng
        if not self.asks_again or not self._asked or rng.random() < 0.25:
            self._asked.append(Asked(prompt, salt, self._schedule.features.new_job()))
            return self._asked[-1]
        before = rng.choice(self._asked[-20:])
        if rng.random() < 0.5:
            return before
        turn = [*before.prompt, *self._schedule.right(before.prompt, rng.randint(1, 20))][:LONGEST_TURN]
        after = dataclasses.replace(before, prompt=turn)
        if rng.random() < 0.5:
            self._asked.append(after)
        return after

    @property
    def asked_lately(self) -> list[Asked]:
        return self._asked[-20:]

    def earlier(self, count: int) -> list[Asked]:
        return self.rng.sample(self._asked, min(count, len(self._asked)))

    def disk_of(self, node: str) -> WorldDisk:
        name = "" if self._is_shared else node
        if name not in self._disks:
            self._disks[name] = WorldDisk(self.rng, self._schedule.note)
        return self._disks[name]

    def begin(self, faults_s: float) -> None:
        if not self.tiers.disk_slots:
            return
        for _ in range(self.rng.randint(0, 5)):
            self._schedule.loop.call_later(self.rng.uniform(0.0, faults_s), self._fault)

    def _fault(self) -> None:
        rng, schedule = self.rng, self._schedule
        schedule.outcome.faults += 1
        name = rng.choice(list(self._disks))
        disk = self._disks[name]
        if rng.random() < 0.3:
            self._cut_power(disk)
            return
        disk.weather = DiskWeather(
            rng.choice([(0.0005, 0.01), (0.05, 0.4), (0.5, 4.0)]),
            rng.choice([0.0, 0.0, 0.5, 1.0]),
            rng.choice([0.0, 0.0, 0.1]),
            rng.choice([0.0, 0.0, 0.3]),
            rng.random() < 0.3,
        )
        lasts = rng.choice([0.5, 3.0, 8.0, 20.0]) * rng.uniform(0.5, 1.5)
        schedule.note(f"the disk of {name or 'all nodes'}: {disk.weather} for {lasts:.1f} s")
        schedule.loop.call_later(lasts, self._fair, disk)

    def _cut_power(self, disk: WorldDisk) -> None:
        """The processes that use the disk end with it."""
        for node in self._on(disk):
            self._schedule.kill_node(node)
        disk.power_cut()

    def _on(self, disk: WorldDisk) -> list[WorldNode]:
        nodes = self._schedule.nodes
        return [node for name, node in nodes.items() if node.process.is_alive and self.disk_of(name) is disk]

    def _fair(self, disk: WorldDisk) -> None:
        disk.weather = DiskWeather()

    def heal(self) -> None:
        for disk in self._disks.values():
            self._fair(disk)
