"""The clocks of a schedule's processes: each counts seconds a little faster or slower, and its time of day may jump. Drawn from a
generator of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator

from tests.world.process import Process

DRIFT = 0.01  # two quartzes differ by much less
BEGINS = 1.7e9  # the time of day when a schedule begins
JUMPS_S = (-86_400.0, -3600.0, -60.0, 60.0, 3600.0, 86_400.0)


def drift_of(seed: int) -> float:
    return random.Random(f"clocks {seed}").choice([0.0, 0.0, DRIFT / 10, DRIFT])


class Clocks:
    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self._drift = drift_of(seed)
        self._rng = random.Random(f"rates {seed}")
        self._loop = loop

    def rate(self) -> float:
        return 1.0 + self._rng.choice([-1.0, 1.0, self._rng.uniform(-1.0, 1.0)]) * self._drift

    def jump(self, process: Process) -> float:
        """The time of day of one process is set."""
        process.wall_s += (by := self._rng.choice(JUMPS_S))
        return by

    def times_of_jumps(self, faults_s: float) -> list[float]:
        return [self._rng.uniform(0.0, faults_s) for _ in range(self._rng.choice([0, 0, 1, 3]))]

    def time_of_day(self) -> float:
        """As the process that acts reads it."""
        return BEGINS + self._loop.time() + (Process.acts.wall_s if Process.acts is not None else 0.0)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """`time.time` tells this time of day."""
        real: Callable[[], float] = time.time
        time.time, Process.acts = self.time_of_day, None
        try:
            yield
        finally:
            time.time, Process.acts = real, None
