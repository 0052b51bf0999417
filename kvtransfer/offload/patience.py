"""How long a tier is waited for, and when it is left out.

A tier is only a cache, so each copy has a deadline. One that misses it is given up: the request computes, or the block
is not stored. A copier touches the device's blocks only inside its job's `Hold`, and waits for no disk there. So when
a copy has been given up, its blocks are free at once, however long a call to the disk still takes.

A tier that lets a copy in progress, or any load, miss its deadline is left out: it finds nothing and stores nothing,
and keeps what it has. After FIRST_OUT_S its own thread tries a small read and write. If they are quick, the tier is
back, else it is out for twice as long, and so on up to MOST_OUT_S. A tier that answers again but goes on missing
deadlines is out twice as long each time, too, until LOADS_TO_TRUST loads in a row have come in time. So one slow read
costs a tier ten seconds, and a disk at a hundredth of its speed is used for a few seconds in ten minutes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

# A load gains nothing if it takes longer than computing. The longest prompts take minutes to compute, and each load may
# take as long as that; but no load is given up before this, because a busy disk pauses for a second or two.
LEAST_LOAD_S = 5.0
# Blocks that a store has not copied cannot be used for anything else.
STORE_S = 10.0
PROBE_S = 1.0  # a page written, synced and read, where nothing else waits
OPEN_S = 30.0  # a large file's index is a page for each slot
FIRST_OUT_S = 10.0
MOST_OUT_S = 640.0
LOADS_TO_TRUST = 16


class GivenUp(Exception):
    """The copy's time is over."""


class TierUnavailable(OSError):
    """The tier does not work, and says why: it is left out for a while."""


class Hold:
    """One copy's right to touch the device's blocks. Inside it nothing may be waited for that can hang."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._given_up:
            self._lock.release()
            raise GivenUp

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def give_up(self) -> bool:
        """Never waits. True: the copy does not touch the blocks any more. False: it does now, so ask again soon."""
        if not self._lock.acquire(blocking=False):
            return False
        self._given_up = True
        self._lock.release()
        return True


class Absence:
    """Whether a tier is left out, why, and until when. The caller has a lock."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._out_s = FIRST_OUT_S  # the next time
        self._in_time = 0
        self.why = ""  # "": the tier is used
        self.until = 0.0

    def leave_out(self, why: str) -> None:
        """Leaves the tier out, or for longer."""
        self.why = why
        self.until = self._clock() + self._out_s
        logger.warning(
            "the %s tier is left out: %s. It is tried again in %.0f s; prompts are computed meanwhile",
            self._name,
            why,
            self._out_s,
        )
        self._out_s = min(2 * self._out_s, MOST_OUT_S)
        self._in_time = 0

    def end(self) -> None:
        self.why = ""
        logger.warning("the %s tier answers again, and is used", self._name)

    def loaded_in_time(self) -> None:
        self._in_time += 1
        if self._in_time >= LOADS_TO_TRUST:
            self._out_s = FIRST_OUT_S
