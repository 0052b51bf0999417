"""How much memory of this machine can be had: what the kernel says, or what a control group leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.machine.control_groups import folders_of


def free_memory() -> int:
    """Bytes that could be allocated now without pushing anybody out."""
    return min(_machine_available(), _cgroup_available())


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_available() -> int:
    """The tightest limit of this process's control group and those above it, less what counts against it."""
    tightest = 1 << 62
    for group in folders_of("memory"):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        tightest = min(tightest, max(0, limit - used + _reclaimable(group)))
    return tightest


def _reclaimable(group: Path) -> int:
    """Files read and not in use: the kernel drops them before it refuses memory."""
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _number(*paths: Path) -> int | None:
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None
