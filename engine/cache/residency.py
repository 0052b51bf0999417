"""How long what is cached stays: whether a larger cache, or a tier beyond it, would find more.

Evictions are counted one by one. Times are taken of a share of the blocks, chosen by their numbers, so a step pays for next to none of
them, however large the pool is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

TIMED_BLOCKS = 1024  # at most twice as many


@dataclasses.dataclass(slots=True)
class ResidencyTotals:
    blocks_evicted: int = 0  # cached blocks that were taken for other tokens
    evictions_timed: int = 0  # of these, those of which the next two are the sums
    evicted_after_seconds: float = 0.0  # since they were cached
    evicted_idle_seconds: float = 0.0  # since a request last had them
    reuses_timed: int = 0  # blocks that no request had, and that one found
    reused_after_seconds: float = 0.0  # since a request last had them


class Residency:
    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = max(1, num_blocks // TIMED_BLOCKS)  # blocks whose number it divides are timed
        self.totals = ResidencyTotals()
        self._clock = clock
        self._cached_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def cached(self, block: int) -> None:
        self._cached_at[block] = self._clock()

    def idle(self, block: int) -> None:
        """It is in no table any more."""
        if block in self._cached_at:
            self._idle_since[block] = self._clock()

    def reused(self, block: int) -> None:
        """It was in no table, and is in one again."""
        since = self._idle_since.pop(block, None)
        if since is not None:
            self.totals.reuses_timed += 1
            self.totals.reused_after_seconds += self._clock() - since

    def evicted(self, block: int) -> None:
        cached_at, idle_since = self._cached_at.pop(block, None), self._idle_since.pop(block, None)
        if cached_at is not None and idle_since is not None:
            now = self._clock()
            self.totals.evictions_timed += 1
            self.totals.evicted_after_seconds += now - cached_at
            self.totals.evicted_idle_seconds += now - idle_since

    def forgotten(self, block: int) -> None:
        """It is not cached any more, and not for want of room."""
        self._cached_at.pop(block, None)
        self._idle_since.pop(block, None)

    def all_forgotten(self) -> None:
        self._cached_at.clear()
        self._idle_since.clear()
