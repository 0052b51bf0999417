"""How long a process's event loop is held: the time between two of its beats."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

BEAT_S = 0.002


class LoopBeat:
    """Beats every 2 ms on the event loop that makes it.

    Between two beats the loop did not come round, because something ran on it or another thread had the interpreter. Other work on
    the machine delays it, too, and does not count: the time that the loop's thread was ready and waited for a core is taken off, and
    no interval counts for more than the process's CPU time in it.
    """

    def __init__(self) -> None:
        self._waits = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._loop = asyncio.get_running_loop()
        self._last = self._clocks()
        self.longest = 0.0
        self._loop.call_later(BEAT_S, self._beat)

    def _clocks(self) -> tuple[float, float]:
        waited_s = int(self._waits.read_text().split()[1]) / 1e9
        return time.perf_counter() - waited_s, time.process_time()

    def _beat(self) -> None:
        now = self._clocks()
        self.longest = max(self.longest, min(now[0] - self._last[0], now[1] - self._last[1]) - BEAT_S)
        self._last = now
        self._loop.call_later(BEAT_S, self._beat)

    def take(self) -> float:
        """Returns the longest time since the last call, in seconds."""
        longest, self.longest = self.longest, 0.0
        return longest
