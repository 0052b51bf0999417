"""What a long work says of itself while it runs, and for how long it has said nothing new.

A work that goes on is never ended for the time that it takes, only for standing still. What is said twice is no progress: a thread
may repeat itself for ever beside work that hangs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

Report = Callable[[str, float], None]
"""What is being done, and how much of it is done (0 to 1)."""

_AMOUNT = re.compile(r" \([\d,]+ MB\)$")
_TINY_S = 1e-6  # what rounding leaves
_LOOKS = 20  # at a work, within the time that it may stand still


def with_amount(what: str, num_bytes: int) -> str:
    """For a work whose end is not known: how far it has got."""
    return f"{what} ({num_bytes // 1_000_000:,} MB)"


def without_amount(what: str) -> str:
    return _AMOUNT.sub("", what)


class LastProgress:
    """The latest progress of one task. `report` may be called from any thread."""

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
        """How long to sleep before `silent_s` is looked at again; 0: it has stood still for `limit_s`."""
        left = limit_s - self.silent_s
        return min(left, limit_s / _LOOKS) if left > _TINY_S else 0.0

    def overslept(self, seconds: float) -> None:
        """The process that looks stood still itself for so long, and could hear nothing."""
        self._new_at += max(0.0, seconds)

    def __str__(self) -> str:
        """Where it is, at the end of a sentence."""
        what, fraction = self._last
        if not what:
            return "and had said nothing"
        return f"at {what!r}" + (f", {fraction:.0%} of it" if 0 < fraction < 1 else "")


class SaidProgress:
    """The last step of a work, numbered, for those who wait for the next. Any thread may report, any may wait."""

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
        """The latest step and its number; waits for one that is newer than `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self._step[0] > seen or self._is_over, timeout_s)
            return self._step

    def end(self) -> None:
        """No waiter is kept from now on."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
