"""How long this machine kept an idle process from running. A gap between two tokens that falls together with such a stall is
the machine's, and nobody else's.

`python stalls.py` prints a line for each stall, `BEGAN LASTED`, on the machine's monotonic clock.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

_NAP_S = 0.02
_LEAST_S = 0.05  # less is what any timer may be late


def watch() -> None:
    while True:
        before = time.monotonic()
        time.sleep(_NAP_S)
        late = time.monotonic() - before - _NAP_S
        if late > _LEAST_S:
            print(f"{before + _NAP_S:.4f} {late:.4f}", flush=True)


class Stalls:
    """Watches from when it is made."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, lasted = map(float, line.split())
            self._found.append((began, lasted))

    def within(self, begin: float, end: float) -> float:
        """Seconds of stalls in this stretch of time."""
        return sum(
            max(0.0, min(end, began + lasted) - max(begin, began)) for began, lasted in list(self._found)
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    watch()
