"""How many cores and how much memory of this machine this process may use: what the kernel says, or what the limits of a
control group (a container, a pod, a service) leave of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

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


def states_of_threads() -> Counter[str]:
    """What the process's threads do, as the kernel sees it: "R", or "S futex_wait" of one that sleeps, where that is told."""
    states: Counter[str] = Counter()
    for thread in threads_here():
        folder = Path(f"/proc/self/task/{thread}")
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            waits_in = (folder / "wchan").read_text().strip("0\n")
        except OSError:
            continue  # it has ended
        states[f"{state} {waits_in}".strip()] += 1
    return states


def bind(threads: Iterable[int], cores: Collection[int]) -> None:
    for thread_id in threads:
        try:
            os.sched_setaffinity(thread_id, cores)
        except ProcessLookupError:
            continue  # it ended meanwhile
        except OSError as error:
            raise ConfigurationError(f"cannot bind to cores {sorted(cores)}: {error}") from error


def free_memory() -> int:
    """Bytes that could be allocated now without pushing any process out."""
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


_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def folders_of(controller: str, membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> list[Path]:
    """The folders of this process's group and of those above it, whose limits hold as well. `controller`: memory, cpu. Version 2 has
    one tree for all of them, version 1 one for each; a folder need not be there, or hold a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        inner = root / path.lstrip("/")
        folders.extend(
            [inner, *(parent for parent in inner.parents if parent == root or root in parent.parents)]
        )
    return folders
