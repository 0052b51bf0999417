"""Finds out whether other processes use the machine, because then the figures are not the system's alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOOK_FOR_S = 1.0
QUIET_CORES = 0.2  # a machine is never entirely idle


def busy_cores() -> float:
    """Returns how many cores are busy at the moment. Call it while no system of the experiment runs."""
    before = _idle_ticks()
    began = time.monotonic()
    time.sleep(_LOOK_FOR_S)
    idle = (_idle_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    return max(0.0, (os.cpu_count() or 1) - idle)


def _idle_ticks() -> int:
    """Returns the ticks in which cores were idle or waited for a disk, summed over all cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[4]) + int(fields[5])
