"""Which process of which machine a node is, and whether one has ended.

The end of a process on this machine is proof that it writes nothing any more: the kernel has taken its memory and its
sockets. It can be seen from the same PID namespace alone: a container has its own. A refused connection or a lost answer
is no such proof.
"""

from __future__ import annotations

import os
from pathlib import Path

from tandem.wire.handoff import ProcessIdentity

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat, counted from after the command's name


def this_process() -> ProcessIdentity:
    started = _stat("self")[_STARTED]
    return ProcessIdentity(
        machine=_machine(), pid_namespace=_pid_namespace(), pid=os.getpid(), started=int(started)
    )


def has_ended(process: ProcessIdentity) -> bool:
    """True only when it is certain: the process is one of this machine and of this PID namespace, and /proc shows that one.
    A number means another process in another namespace."""
    try:
        if (process.machine, process.pid_namespace) != (
            _machine(),
            _pid_namespace(),
        ) or not _shows_our_namespace():
            return False
        fields = _stat(str(process.pid))
        if int(fields[_STARTED]) != process.started:
            return True  # the number has been given to another process
        # A process of several threads that is being killed is a zombie while the others still run.
        return fields[_STATE] in ("Z", "X") and len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except FileNotFoundError:
        return _is_unused(process.pid)
    except OSError:
        return False


def _is_unused(pid: int) -> bool:
    """/proc may hide the processes of other users; the kernel does not hide that there is one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _shows_our_namespace() -> bool:
    """A /proc that was mounted for an outer namespace shows the numbers that processes have there: ours would be two."""
    for line in (_PROC / "self/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) == 2
    return False


def _stat(pid: str) -> list[str]:
    # The name stands in parentheses and may hold anything, parentheses and spaces too.
    return (_PROC / pid / "stat").read_text().rpartition(")")[2].split()


def _machine() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat(_PROC / "self/ns/pid").st_ino
