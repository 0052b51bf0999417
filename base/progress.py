"""The latest step of a long task, and how long ago it came.

A task is never ended because it takes long, only because it stands still. A repeated report is no progress: a thread
may repeat itself for ever while the work hangs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

Report = Callable[[str, float], None]
"""Takes what is being done, and which fraction of it is done (0 to 1)."""

_AMOUNT = re.compile(r" \([\d,]+ (?:MB|s of computing)\)$")
_TINY_S = 1e-6  # less than this is rounding
_LOOKS = 20  # how often a task is looked at within the time that it may stand still


def with_amount(what: str, num_bytes: int) -> str:
    """Adds the amount that is done, for work whose total is unknown."""
    return f"{what} ({num_bytes // 1_000_000:,} MB)"


def without_amount(what: str) -> str:
    return _AMOUNT.sub("", what)


class LastProgress:
    """The latest progress of one task. Any thread may call `report`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.begin()

    def begin(self) -> None:
        self._last = ("", 0.0)
        self._new_at = self._now()

    def report(self, what: str, fraction: float) -> None:
        if (what, fraction) != self._last:
            self._last = (what, fraction)
            self._new_at = self._now()

    @property
    def silent_s(self) -> float:
        return self._now() - self._new_at

    def next_look(self, limit_s: float) -> float:
        """Returns how long to sleep before looking at `silent_s` again; 0: the task has stood still for `limit_s`."""
        left = limit_s - self.silent_s
        return min(left, limit_s / _LOOKS) if left > _TINY_S else 0.0

    def overslept(self, seconds: float) -> None:
        """The watching process itself stood still for `seconds`, and could receive no report."""
        self._new_at += max(0.0, seconds)

    def __str__(self) -> str:
        """The latest step, as the end of a sentence."""
        what, fraction = self._last
        if not what:
            return "and had said nothing"
        return f"at {what!r}" + (f", {fraction:.0%} of it" if 0 < fraction < 1 else "")


class SaidProgress:
    """The latest step of a task, numbered, for threads that wait for the next one. Any thread may report or wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step: tuple[int, str, float] = (0, "", 0.0)
        self._is_over = False

    def report(self, what: str, fraction: float) -> None:
        with self._changed:
            if (what, fraction) != self._step[1:]:
                self._step = (self._step[0] + 1, what, fraction)
                self._changed.notify_all()

    def after(self, seen: int, timeout_s: float) -> tuple[int, str, float]:
        """Returns the latest step with its number. Waits at most `timeout_s` for one that is newer than `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self._step[0] > seen or self._is_over, timeout_s)
            return self._step

    def end(self) -> None:
        """From now on `after` does not wait."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
