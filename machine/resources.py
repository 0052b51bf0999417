"""How many cores and how much memory this process may use: the machine's, or what the limits of its control group (a container, a pod,
a service) leave of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from tandem.base.errors import ConfigurationError


def usable_cores() -> int:
    """Returns how many threads can compute at once."""
    return core_quota() or len(os.sched_getaffinity(0))


def core_quota() -> int | None:
    """Returns how many cores' time this process may use, in whole cores and at least one; None: as much as all cores that it may run on.

    More threads than that would not compute more: when the period's time is used up, all of them are stopped.
    """
    quotas = [found for folder in folders_of("cpu") if (found := _quota(folder)) is not None]
    whole = max(1, int(min(quotas))) if quotas else None
    return whole if whole is not None and whole < len(os.sched_getaffinity(0)) else None


def _quota(folder: Path) -> float | None:
    """Returns the group's limit in cores; None without a limit."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    # Without a limit, version 2 writes max and version 1 writes -1.
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() and int(period) else None


def threads_here() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def states_of_threads() -> Counter[str]:
    """Counts this process's threads by the state that the kernel reports: "R", or "S futex_wait" for one that sleeps there."""
    states: Counter[str] = Counter()
    for thread in threads_here():
        folder = Path(f"/proc/self/task/{thread}")
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            waits_in = (folder / "wchan").read_text().strip("0\n")
        except OSError:
            continue  # the thread has ended
        states[f"{state} {waits_in}".strip()] += 1
    return states


def bind(threads: Iterable[int], cores: Collection[int]) -> None:
    for thread_id in threads:
        try:
            os.sched_setaffinity(thread_id, cores)
        except ProcessLookupError:
            continue  # the thread has ended
        except OSError as error:
            raise ConfigurationError(f"cannot bind to cores {sorted(cores)}: {error}") from error


def resident_memory() -> int | None:
    """Returns how many bytes of memory this process uses, mapped files among them; None if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Returns how many bytes can be allocated now without pushing another process's memory out."""
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
    """Returns the least that this process's control group, or one above it, leaves of its limit."""
    tightest = 1 << 62
    for group in folders_of("memory"):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        tightest = min(tightest, max(0, limit - used + _reclaimable(group)))
    return tightest


def _reclaimable(group: Path) -> int:
    """Returns the size of cached files that are not in use: the kernel drops them before it refuses memory."""
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
    """Returns the folders of this process's group and of those above it, whose limits hold as well. `controller` is memory or cpu. Version 2
    has one tree for all controllers, version 1 has one for each. A folder need not exist or have a limit."""
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
        folders.extend([inner, *(parent for parent in inner.parents if parent == root or root in parent.parents)])
    return folders
