"""What happened in the deployment, numbered, so that another process can follow it."""

from __future__ import annotations

import asyncio
import contextlib
import enum

import msgspec

from tandem.cluster.events import Events

KEPT = 500  # a follower that falls further behind misses the oldest events


class EventKind(enum.StrEnum):
    PROGRESS = "progress"
    READY = "ready"
    TROUBLE = "trouble"
    GAVE_UP = "gave_up"


class LoggedEvent(msgspec.Struct, frozen=True):
    number: int
    kind: EventKind
    name: str
    what: str
    fraction: float = 0.0


class EventLog:
    """Implements `cluster.events.Events` and passes every event on to `also`. For one event loop."""

    def __init__(self, also: Events) -> None:
        self._also = also
        self._kept: dict[int, LoggedEvent] = {}
        self._progress: dict[
            str, int
        ] = {}  # the number of each name's latest progress; older ones are dropped
        self._news = asyncio.Event()  # set once, for those that wait now; later ones wait for its replacement
        self.latest = 0

    def progress(self, name: str, what: str, fraction: float) -> None:
        self._also.progress(name, what, fraction)
        self._add(EventKind.PROGRESS, name, what, fraction)

    def ready(self, name: str, what: str) -> None:
        self._also.ready(name, what)
        self._add(EventKind.READY, name, what)

    def trouble(self, name: str, what: str) -> None:
        self._also.trouble(name, what)
        self._add(EventKind.TROUBLE, name, what)

    def gave_up(self, name: str, why: str) -> None:
        self._also.gave_up(name, why)
        self._add(EventKind.GAVE_UP, name, why)

    def _add(self, kind: EventKind, name: str, what: str, fraction: float = 0.0) -> None:
        self.latest += 1
        self._kept[self.latest] = LoggedEvent(self.latest, kind, name, what, fraction)
        if kind is EventKind.PROGRESS:
            self._kept.pop(self._progress.get(name, 0), None)
            self._progress[name] = self.latest
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        self.wake()

    def wake(self) -> None:
        """Wakes every waiter, so that it looks again."""
        self._news.set()
        self._news = asyncio.Event()

    def after(self, seen: int) -> list[LoggedEvent]:
        """Returns the events after number `seen`. A follower that has seen more than exists followed an earlier controller: it gets all."""
        if seen > self.latest:
            seen = 0
        return [happening for number, happening in self._kept.items() if number > seen]

    async def wait_after(self, seen: int, timeout_s: float) -> None:
        """Returns when an event after `seen` has happened, at `wake`, or after `timeout_s`."""
        if self.latest != seen:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)


def replay(happened: list[LoggedEvent], events: Events) -> None:
    for one in happened:
        match one.kind:
            case EventKind.PROGRESS:
                events.progress(one.name, one.what, one.fraction)
            case EventKind.READY:
                events.ready(one.name, one.what)
            case EventKind.TROUBLE:
                events.trouble(one.name, one.what)
            case EventKind.GAVE_UP:
                events.gave_up(one.name, one.what)
