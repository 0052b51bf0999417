"""Runs a compiler for as long as it uses the processor, however slow that is."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_LOOK_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BuildFailed(Exception):
    """There is no compiler, or it failed. Models can still run through torch, the general path."""


class Stillness:
    """Tells when something has not changed for LIMIT_S."""

    LIMIT_S = 600.0

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: object = None
        self._changed_at = now()

    def has_lasted(self, state: object) -> bool:
        if state != self._last:
            self._last, self._changed_at = state, self._now()
        return self._now() - self._changed_at > self.LIMIT_S


def run(command: Sequence[str], ending: threading.Event | None = None) -> str:
    """Returns what the command prints. Ends it once it has used no processor time for Stillness.LIMIT_S, or when `ending` is set. Raises
    BuildFailed."""
    try:
        process = subprocess.Popen(
            command,
            # Its words name the library's folder: the same ones for a person's shell, for cron and for a service
            env={**os.environ, "LC_ALL": "C"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from error
    still = Stillness(time.monotonic)
    with process:
        while True:
            try:
                printed, said = process.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                family = _with_children(process.pid)
                if still.has_lasted(sum(family.values())):
                    _kill(family)
                    raise BuildFailed(
                        f"{command[0]} has stood still for {still.LIMIT_S:.0f} s, and was ended"
                    ) from None
                if ending is not None and ending.is_set():
                    _kill(family)
                    raise BuildFailed(f"{command[0]} was ended") from None
    if process.returncode != 0:
        lines = "\n".join(said.strip().splitlines()[:8])
        raise BuildFailed(f"{command[0]} could not compile the native library:\n{lines}")
    return printed


def spent_s() -> float:
    """Returns the processor time of all commands that this process has run, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = _with_children(os.getpid())
    running.pop(os.getpid(), None)
    return ended.ru_utime + ended.ru_stime + sum(running.values())


def _with_children(pid: int) -> dict[int, float]:
    """Returns the processor time of this process and of those below it, with that of children that have ended."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            one = int(entry.parent.name)
            parents[one] = int(fields[1])
            seconds[one] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    found = {pid} & seconds.keys()
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return {one: seconds[one] for one in found}


def _kill(family: dict[int, float]) -> None:
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
