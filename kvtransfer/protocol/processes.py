"""Says which process on which machine a node is, and whether a process has ended.

The end of a process on this machine proves that it writes nothing any more: the kernel has taken its memory and its
sockets. Only a process in the same PID namespace can see it, and a container has its own namespace. A refused
connection or a lost answer proves nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from tandem.wire.handoff import ProcessIdentity

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat, counted from the one after the command's name


def this_process() -> ProcessIdentity:
    started = _stat("self")[_STARTED]
    return ProcessIdentity(machine=_machine(), pid_namespace=_pid_namespace(), pid=os.getpid(), started=int(started))


def has_ended(process: ProcessIdentity) -> bool:
    """True only if it is certain: the process ran on this machine and in this PID namespace, and /proc shows this
    namespace. In another namespace the same number means another process."""
    try:
        if (process.machine, process.pid_namespace) != (_machine(), _pid_namespace()) or not _shows_our_namespace():
            return False
        fields = _stat(str(process.pid))
        if int(fields[_STARTED]) != process.started:
            return True  # another process has the number now
        # While a process of several threads is killed, it is a zombie although other threads still run.
        return fields[_STATE] in ("Z", "X") and len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except FileNotFoundError:
        return _is_unused(process.pid)
    except OSError:
        return False


def _is_unused(pid: int) -> bool:
    """True if no process has this number. /proc may hide other users' processes; the kernel says that they exist."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _shows_our_namespace() -> bool:
    """Whether /proc shows this PID namespace. One that was mounted for an outer namespace shows the outer numbers, and
    two of them for this process."""
    for line in (_PROC / "self/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) == 2
    return False


def _stat(pid: str) -> list[str]:
    # The name stands in parentheses and may itself have parentheses and spaces.
    return (_PROC / pid / "stat").read_text().rpartition(")")[2].split()


def _machine() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat(_PROC / "self/ns/pid").st_ino
