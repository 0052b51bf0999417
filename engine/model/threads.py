"""How many CPU threads the model may use."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def usable_cores() -> int:
    """Cores that this process may run on: its affinity mask, and its container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def bind_threads(threads: int) -> int:
    """Tell torch, and return the number: `threads`, or every usable core when it is 0."""
    count = threads if threads > 0 else usable_cores()
    torch.set_num_threads(count)
    return count
