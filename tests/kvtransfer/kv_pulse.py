"""Measures how long this process was ready but did not run: on a busy machine that may exceed a short lease."""

from __future__ import annotations

import threading
import time

BEAT_S = 0.05
# Other threads of the process, which hold the interpreter for some milliseconds.
ORDINARY_S = 0.02


class Pulse:
    def __init__(self) -> None:
        self._lost_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            slept_at = time.monotonic()
            if self._stop.wait(BEAT_S):
                return
            late_s = time.monotonic() - slept_at - BEAT_S
            if late_s > ORDINARY_S:
                self._lost_s += late_s

    def lost_s(self) -> float:
        return self._lost_s

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
