"""Measures how long this machine kept processes from running, so that a gap between two tokens during such a stall is not blamed on
Tandem.

There are two measurements. An idle process sleeps for short times and notes when it wakes up late. And the kernel counts how long the
working thread of each serving process was ready but had no core (/proc/PID/task/TID/schedstat), because the processes of five hosts
share one machine's cores here.

`python stalls.py` is the idle process. It prints a line for each stall: `BEGAN LASTED`, on the machine's monotonic clock.
"""

from __future__ import annotations

import bisect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_NAP_S = 0.02
_LEAST_S = 0.05  # any timer may be late by less than this
_LOOK_EVERY_S = 0.5


def watch() -> None:
    while True:
        before = time.monotonic()
        time.sleep(_NAP_S)
        late = time.monotonic() - before - _NAP_S
        if late > _LEAST_S:
            print(f"{before + _NAP_S:.4f} {late:.4f}", flush=True)


class Stalls:
    """Watches from its creation on. `serving`: the ids of the serving processes by kind, in this machine's numbering."""

    def __init__(self, serving: Callable[[], dict[str, list[int]]]) -> None:
        self._serving = serving
        self._found: list[tuple[float, float]] = []
        self._threads: dict[str, dict[int, dict[int, Thread]]] = {}  # by kind, process and thread
        self._ending = threading.Event()
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._look, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, lasted = map(float, line.split())
            self._found.append((began, lasted))

    def _look(self) -> None:
        while not self._ending.wait(_LOOK_EVERY_S):
            try:
                serving = self._serving()
            except (AssertionError, subprocess.SubprocessError):
                continue  # the hosts are being ended
            for kind, pids in serving.items():
                of_kind = self._threads.setdefault(kind, {})
                for pid in pids:
                    threads = of_kind.setdefault(pid, {})
                    for number, (ran, waited) in times_of(pid).items():
                        threads.setdefault(number, Thread()).note(time.monotonic(), ran, waited)

    def within(self, begin: float, end: float) -> float:
        """The seconds of this interval that are the machine's fault. A request passes one process of each kind, so this adds up the longest
        wait among the processes of each kind."""
        late = sum(max(0.0, min(end, began + lasted) - max(begin, began)) for began, lasted in list(self._found))
        ready = sum(
            max((waited_by(list(threads.values()), begin, end) for threads in list(processes.values())), default=0.0)
            for processes in list(self._threads.values())
        )
        return min(end - begin, max(late, ready))

    def close(self) -> None:
        self._ending.set()
        self._process.kill()
        self._process.wait()


class Thread:
    """Samples of one thread: when, how long it has run, and how long it was ready without a core."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._counts: list[tuple[float, float]] = []

    def note(self, at: float, ran: float, waited: float) -> None:
        self._times.append(at)
        self._counts.append((ran, waited))

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """The seconds that the thread ran and waited, from the last sample before `begin` to the first after `end`. The wait is at most
        the length of the interval."""
        if not self._times:
            return 0.0, 0.0
        first = max(0, bisect.bisect_right(self._times, begin) - 1)
        last = min(len(self._times) - 1, bisect.bisect_left(self._times, end))
        (ran_before, waited_before), (ran, waited) = self._counts[first], self._counts[last]
        return max(0.0, ran - ran_before), min(end - begin, max(0.0, waited - waited_before))


def waited_by(threads: Sequence[Thread], begin: float, end: float) -> float:
    """How long a process's working thread waited: the thread that ran the longest."""
    return max((one.between(begin, end) for one in threads), default=(0.0, 0.0))[1]


def times_of(pid: int) -> dict[int, tuple[float, float]]:
    """Seconds that each thread ran and waited; empty for a process that has ended."""
    found = {}
    try:
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            try:
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[int(task.name)] = (int(ran) / 1e9, int(waited) / 1e9)
            except (OSError, ValueError):
                continue
    except OSError:
        pass
    return found


if __name__ == "__main__":
    watch()
