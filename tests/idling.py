"""Measures the share of a core that this process uses while it is idle."""

from __future__ import annotations

import threading
import time


def idle_share(windows: int = 3, seconds: float = 1.0) -> float:
    """The least of several windows. Leftover work of earlier tests ends in one of them; a thread that spins does so in all."""
    return min(_share(seconds) for _ in range(windows))


def _share(seconds: float) -> float:
    before, started = time.process_time(), time.monotonic()
    threading.Event().wait(seconds)
    return (time.process_time() - before) / (time.monotonic() - started)
