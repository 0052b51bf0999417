"""Which process of which machine a node is, and whether such a process has ended.

The end of a process on this machine is proof that it writes nothing any more: the kernel has taken its memory and its
sockets. A refused connection or a lost answer is no such proof.
"""

from __future__ import annotations

import os
from pathlib import Path

from tandem.wire.handoff import ProcessIdentity

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat, counted from after the command's name


def this_process() -> ProcessIdentity:
    fields = _stat(os.getpid())
    return ProcessIdentity(
        machine=_machine(), pid_namespace=_pid_namespace(), pid=os.getpid(), started=int(fields[_STARTED])
    )


def has_ended(process: ProcessIdentity) -> bool:
    """True only when it is certain: the process is one of this machine that can be looked up from here."""
    if (process.machine, process.pid_namespace) != (_machine(), _pid_namespace()):
        return False
    try:
        fields = _stat(process.pid)
        if int(fields[_STARTED]) != process.started:
            return True  # the number has been given to another process
        # A process of several threads that is being killed is a zombie while the others still run.
        return fields[_STATE] in ("Z", "X") and len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    # The name stands in parentheses and may hold anything, parentheses and spaces too.
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _machine() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat(_PROC / "self/ns/pid").st_ino
