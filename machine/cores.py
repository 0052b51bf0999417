"""How many cores of this machine can be had: those that this process may run on, or what a control group's quota of
time leaves of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from tandem.machine.control_groups import folders_of
from tandem.wire.errors import ConfigurationError


def usable_cores() -> int:
    """How many threads can compute at once."""
    return core_quota() or len(os.sched_getaffinity(0))


def core_quota() -> int | None:
    """How many cores' time this process may use, in whole cores and at least one; None: that of all it may run on.

    A thread more would not compute more: when the time of a period is used up, all of them stand still.
    """
    quotas = [found for folder in folders_of("cpu") if (found := _quota(folder)) is not None]
    whole = max(1, int(min(quotas))) if quotas else None
    return whole if whole is not None and whole < len(os.sched_getaffinity(0)) else None


def _quota(folder: Path) -> float | None:
    """Cores' worth of time; None without a limit."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    # Without a limit the one says max, the other -1.
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() and int(period) else None


def threads_here() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def bind(threads: Iterable[int], cores: Collection[int]) -> None:
    for thread_id in threads:
        try:
            os.sched_setaffinity(thread_id, cores)
        except ProcessLookupError:
            continue  # it ended meanwhile
        except OSError as error:
            raise ConfigurationError(f"cannot bind to cores {sorted(cores)}: {error}") from error
