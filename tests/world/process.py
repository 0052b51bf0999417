"""A process of the world. What is due in it happens only while it runs: a stopped one does it later, an ended one never."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from tandem.base.errors import InternalError
from tandem.wire.curve import ProcessKeys
from tandem.wire.endpoints import key_bytes
from tandem.wire.handoff import ProcessIdentity

LEAST_S = 1e-6  # a shorter wait would not move the clock
MOST_AT_ONCE = 10_000  # turns while no time passes

_pids = itertools.count(1)


def begin_pids() -> None:
    """A schedule numbers its processes from the start, as a machine does when it boots."""
    global _pids
    _pids = itertools.count(1)


class Process:
    acts: Process | None = None  # the one that did something last

    def __init__(
        self, loop: asyncio.AbstractEventLoop, name: str, machine: str, skew: float = 0.0, rate: float = 1.0
    ) -> None:
        """`rate`: how many seconds its clock counts in one second."""
        self.loop = loop
        self.name = name
        self.machine = machine
        self.skew, self.rate = skew, rate
        self.wall_s = 0.0  # how far its time of day is ahead
        self.identity = ProcessIdentity(machine, 1, next(_pids), 0)
        self.keys = ProcessKeys()
        self.key = key_bytes(self.keys.public)
        self.is_alive = True
        self.is_stopped = False
        self._put_off: list[Callable[[], None]] = []
        self.on_end: list[Callable[[], None]] = []

    def clock(self) -> float:
        return self.loop.time() * self.rate + self.skew

    def do(self, what: Callable[[], None]) -> None:
        """Does something in this process now, when it goes on, or never."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._put_off.append(what)
            return
        Process.acts = self
        what()

    def later(self, seconds: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """`seconds` are those of its clock."""
        return self.loop.call_later(max(seconds, 0.0) / self.rate, self.do, what)

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        put_off, self._put_off = self._put_off, []
        for what in put_off:
            self.do(what)

    def end(self) -> None:
        self.is_alive = False
        self._put_off.clear()
        for callback in self.on_end:
            callback()


class Timer:
    """One thing that a process does again and again, at a time that may be brought forward."""

    def __init__(self, process: Process, what: Callable[[], float | None]) -> None:
        """`what` returns in how many seconds it is due again; None: never."""
        self._process = process
        self._what = what
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._runs = False
        self._again: float | None = None
        self._fired_at, self._at_once = -1.0, 0

    def within(self, seconds: float) -> None:
        due = self._process.loop.time() + seconds / self._process.rate
        if self._runs:
            self._again = due if self._again is None else min(self._again, due)
            return
        if self._handle is not None:
            if self._due <= due:
                return
            self._handle.cancel()
        self._due = due
        self._handle = self._process.later(seconds, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._runs, self._again = True, None
        self._look_whether_time_passes()
        try:
            wait = self._what()
        finally:
            self._runs = False
        if wait is not None and wait > 0:
            wait = max(wait, LEAST_S)
        now, rate = self._process.loop.time(), self._process.rate
        dues = [due for due in (self._again, None if wait is None else now + wait / rate) if due is not None]
        if dues:
            self.within(max(0.0, min(dues) - now) * rate)

    def _look_whether_time_passes(self) -> None:
        now = self._process.loop.time()
        self._fired_at, self._at_once = now, self._at_once + 1 if now == self._fired_at else 0
        if self._at_once > MOST_AT_ONCE:
            raise InternalError(f"{self._process.name} takes turn after turn and waits for nothing")
