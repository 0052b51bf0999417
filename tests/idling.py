"""How much of a core this process uses while nothing is to be done."""

from __future__ import annotations

import threading
import time


def idle_share(windows: int = 3, seconds: float = 1.0) -> float:
    """The least of a few. What earlier tests left may end in one of them; what spins, spins in every one."""
    return min(_share(seconds) for _ in range(windows))


def _share(seconds: float) -> float:
    before, started = time.process_time(), time.monotonic()
    threading.Event().wait(seconds)
    return (time.process_time() - before) / (time.monotonic() - started)
