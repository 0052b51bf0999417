"""Kills a node every now and then; the next one only when the cluster is whole again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable

import msgspec

from benchmarks.soaking.cluster import SoakCluster, is_whole
from benchmarks.soaking.watching import title_of
from tandem.base.errors import DeadlineExceeded

VICTIMS = ("ray::PrefillActor", "ray::DecodeActor")
WHOLE_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.25


class Kill(msgspec.Struct, frozen=True):
    at_s: float
    victim: str
    whole_after_s: float


class Killer:
    def __init__(
        self, view: SoakCluster, processes: Callable[[], list[int]], every_s: float, seed: int
    ) -> None:
        self.kills: list[Kill] = []
        self._view = view
        self._processes = processes
        self._every_s = every_s
        self._random = random.Random(seed)
        self._began = time.monotonic()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises DeadlineExceeded if a killed node has no successor in time."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.kill_one()

    async def kill_one(self) -> None:
        victims = [process for process in self._processes() if title_of(process).startswith(VICTIMS)]
        victim = self._random.choice(sorted(victims))
        title = title_of(victim)
        before = {node.incarnation for node in await self._view.nodes()}
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            nodes = await self._view.nodes()
            if is_whole(nodes, len(before)) and {node.incarnation for node in nodes} != before:
                break
            if time.monotonic() - killed > WHOLE_WITHIN_S:
                raise DeadlineExceeded(
                    f"{title} was killed and has no successor after {WHOLE_WITHIN_S:.0f} s"
                )
        self.kills.append(Kill(killed - self._began, title, time.monotonic() - killed))
