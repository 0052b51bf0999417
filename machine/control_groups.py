"""Where the kernel keeps the limits of this process's control group: a container's, a pod's, a service's."""

from __future__ import annotations

from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def folders_of(controller: str, membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> list[Path]:
    """Of this process's group and of those above it, whose limits hold as well. `controller`: memory, cpu. Version 2 has
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
