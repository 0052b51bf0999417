"""What a process has: threads and descriptors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

from tests.waiting import until


def resources() -> tuple[int, int, int]:
    gc.collect()  # the memory of an engine in miniature is open as long as its tensors are there
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def leaves_nothing_behind(round_trip: Callable[[], None]) -> None:
    round_trip()  # what is made once for the process is made now
    before = resources()
    for _ in range(3):
        round_trip()
    until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))
