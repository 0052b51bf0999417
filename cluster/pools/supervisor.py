"""Supervises one process: starts it, watches it, replaces it, and leaves it out if it cannot start.

STARTING ──▶ READY ──▶ (lost) ──▶ RESTARTING ──▶ STARTING ...
    │          └── told to leave ──▶ DRAINING ──▶ (lost, or stopped) ──▶ STOPPED
    └── three failures in a row, or a configuration error before it ever worked ──▶ LEFT_OUT
"""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.base.logs import LogPage, LogPosition
from tandem.base.progress import LastProgress
from tandem.cluster.config import ClusterTimeouts
from tandem.cluster.events import Events
from tandem.cluster.launcher import Handle, Launcher, LogSource
from tandem.cluster.pools.state import ClusterState, Membership
from tandem.cluster.pools.witnesses import Silence, Witnesses
from tandem.cluster.tasks import Clock, Wakeup, first_of, has_ended
from tandem.wire.nodes import NodeInfo, PoolReport

logger = logging.getLogger(__name__)

MAX_START_FAILURES = 3

Ready = TypeVar("Ready")
H = TypeVar("H", bound=Handle[object])
T = TypeVar("T")


class ProcessPhase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    LEFT_OUT = "left out"
    STOPPED = "stopped"

    @property
    def serves(self) -> bool:
        return self in (ProcessPhase.READY, ProcessPhase.DRAINING)

    def may_serve(self, info: object | None) -> bool:
        """Whether a process that announced itself as `info`, maybe to an earlier controller which this one cannot reach yet, serves or is
        about to."""
        return self.serves or (self is ProcessPhase.STARTING and info is not None)


AdapterPlaces = Mapping[str, str]
"""The location of each adapter by name: a folder, or owner/name on the hub."""


StateChange = Callable[[ClusterState], ClusterState]


class StateRecorder(Protocol):
    """Has the recorded state, as supervisors and departures use it."""

    changed: Wakeup  # rung at every new phase, and when what a router serves has changed
    changing_adapters: asyncio.Lock  # held while the adapters of nodes are changed

    def check(self, info: NodeInfo) -> None:
        """Called before a node is announced. Raises ConfigurationError for one that must not join."""

    async def record(self, what: str) -> None:
        """Records what processes have become, if it can: `what` is said if it cannot."""

    async def confirm(self) -> None:
        """Does not return once a later controller has taken over."""

    def adapters_of(self, node_id: str) -> AdapterPlaces | None:
        """Returns the adapters that a node should have; None if its configuration allows none."""

    def pool_reports(self) -> Sequence[PoolReport]:
        """Returns what routers show of their pools."""

    async def update(self, change: StateChange) -> None: ...
    def is_lost(self, name: str) -> bool:
        """Returns whether the machine of this node or router is gone, so that waiting for it is in vain."""

    def note(self, text: str) -> None:
        """Tells operators."""

    def wake(self) -> None:
        """Called when a router begins to serve, when a router's process got SIGTERM, and when a node is gone."""


@dataclass(slots=True)
class SupervisorContext:
    """What all supervisors of a fleet share. The time-outs can change."""

    recorder: StateRecorder
    launcher: Launcher
    membership: Membership
    witnesses: Witnesses
    timeouts: ClusterTimeouts
    events: Events
    clock: Clock


class ProcessSupervisor(abc.ABC, Generic[H, Ready]):
    """`run` returns when the process is left out, or lost while it leaves; the owner may cancel it. Then `stop` ends the process."""

    def __init__(self, name: str, context: SupervisorContext, info: Ready | None) -> None:
        self.name = name
        self.info = info  # as it last announced itself, maybe to an earlier controller
        self.phase = ProcessPhase.STARTING
        self.detail = ""  # the reason for the phase; when READY again, why it was restarted
        self.restarts = 0
        self.ready_since: float | None = None  # None: it is not READY
        self.answered_at = 0.0  # when it last answered, as one that serves
        self._context = context
        self._events = context.events
        self._clock = context.clock
        self._settled = asyncio.Event()  # set once it has been READY or LEFT_OUT
        self._leaving = False  # set: the process is not replaced when it ends
        self.progress = LastProgress(context.clock.now)  # of its start, or of later loading
        self.handle: H | None = None
        self._has_worked = False

    def _served_s(self, since: float | None) -> float | None:
        """For how long it has certainly served: it may have ended since its last answer."""
        return None if since is None else max(0.0, self.answered_at - since)

    @property
    def _timeouts(self) -> ClusterTimeouts:
        return self._context.timeouts

    # --- what nodes and routers do differently

    @abc.abstractmethod
    def _launch(self) -> H: ...

    @abc.abstractmethod
    async def _start(self, handle: H) -> Ready: ...

    @abc.abstractmethod
    async def _watch(self, handle: H, ready: Ready) -> str:
        """Returns the reason when the process must be replaced."""

    @abc.abstractmethod
    def _describe(self, ready: Ready) -> str: ...

    def _may_leave_out(self) -> bool:
        return True

    def _starts_otherwise(self) -> bool:
        """Whether its next start may succeed where the last one could not, with the same configuration."""
        return False

    async def _left_out(self) -> None:
        """Called when it is left out: only an operator's request starts it again."""

    async def _lost(self) -> None:
        """Called first whenever the process has stopped serving, or did not start."""

    # --- what both do alike

    def log_sources(self) -> dict[str, LogSource]:
        """Its processes by name. Those that are not running are missing, except the one that has its own name."""
        return {self.name: self}

    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        """Raises Unavailable if it has no process."""
        if self.handle is None:
            raise Unavailable(f"its process is not running ({self.phase.value}{self.detail and f': {self.detail}'})")
        return await self.handle.log_page(after, last, most)

    @property
    def has_settled(self) -> bool:
        """Whether it has been ready, is left out, or has ended."""
        return self._settled.is_set()

    @property
    def serves(self) -> bool:
        return self.phase.serves

    @property
    def may_serve(self) -> bool:
        return self.phase.may_serve(self.info)

    async def settled(self) -> None:
        await self._settled.wait()

    async def run(self) -> None:
        """May be called again after the process was left out: the counts of failures start again at 0."""
        failures = 0
        self._enter(ProcessPhase.STARTING, self.detail)
        while True:
            await self._context.recorder.confirm()  # a later controller may have ended it
            self.handle = handle = self._launch()
            try:
                ready = await self._start_or_end(handle)
            except TandemError as error:
                failures += 1
                await self._lost()
                await handle.stop()
                # A configuration with which it has worked can work again, for example when enough memory is free.
                mistaken = isinstance(error, ConfigurationError) and not self._has_worked
                mistaken = mistaken and not self._starts_otherwise()
                if (mistaken or failures >= MAX_START_FAILURES) and self._may_leave_out():
                    self._leave_out(error, failures)
                    await self._left_out()
                    return
                await self._pause(f"did not start ({failures} of {MAX_START_FAILURES}): {error}", failures)
                continue
            failures = 0
            self._has_worked = True
            self._enter(
                ProcessPhase.DRAINING if self._leaving else ProcessPhase.READY, self.detail if self.restarts else ""
            )
            self._events.ready(self.name, self._describe(ready))
            self._settled.set()
            since = self._clock.now()
            try:
                reason = await self._watch_until_lost(handle, ready)
            finally:
                await self._lost()
            await handle.stop()
            if self._leaving:
                self._ended(reason)
                return
            if self._clock.now() - since > self._timeouts.restart_backoff_max_s:
                self.restarts = 0
            self.restarts += 1
            await self._pause(reason, self.restarts)

    async def _start_or_end(self, handle: H) -> Ready:
        """Also ends when the process does: a process that dies during its start may leave the call to `start` unanswered."""
        start, ended = await first_of(
            self._while_it_progresses(self._start(handle), f"starting {self.name}"), handle.ended()
        )
        if has_ended(start):
            return start.result()
        raise TandemError(f"its process ended during its start: {ended.result()}")

    async def _while_it_progresses(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Loading may take any time as long as `report` is called. Raises DeadlineExceeded after `timeouts.start_s` without a report."""
        return await self._clock.while_it_progresses(
            self._timeouts.start_s, work, f"{what} (timeouts.start_s)", self.progress
        )

    async def _asked(self, limit_s: float, work: Coroutine[Any, Any, T], what: str, otherwise: T) -> T:
        """Returns the process's answer; `otherwise`, with a line in the log, if none comes in time."""
        try:
            return await self._clock.within(limit_s, work, what)
        except TandemError as error:
            logger.warning("%s", error)
            return otherwise

    async def _watch_until_lost(self, handle: H, ready: Ready) -> str:
        watch, ended = await first_of(self._watch(handle, ready), handle.ended())
        return f"its process ended: {ended.result()}" if has_ended(ended) else watch.result()

    async def _pause(self, reason: str, attempt: int) -> None:
        backoff = min(self._timeouts.restart_backoff_s * 2 ** (attempt - 1), self._timeouts.restart_backoff_max_s)
        self._enter(ProcessPhase.RESTARTING, reason)
        self._events.trouble(self.name, f"{reason}; starting it again in {backoff:g} s")
        await self._clock.sleep(backoff)
        self._enter(ProcessPhase.STARTING, reason)

    def _leave_out(self, error: TandemError, failures: int) -> None:
        self._enter(ProcessPhase.LEFT_OUT, str(error))
        times = "" if failures == 1 else f"failed {failures} times in a row: "
        self._events.gave_up(self.name, f"{times}{error}")
        self._settled.set()

    def try_again(self) -> None:
        """Call this before `run` for a process that was left out."""
        self._settled.clear()
        self._enter(ProcessPhase.STARTING, self.detail)

    def stay_left_out(self, reason: str) -> None:
        """Call this instead of `run` for a process that an earlier controller left out."""
        self._enter(ProcessPhase.LEFT_OUT, reason)
        self._settled.set()

    def _new_silence(self) -> Silence:
        """Returns a counter for a process that is asked every `heartbeat_s` and has `silence_s` to answer."""
        return Silence(self._clock, self._timeouts.heartbeat_s + self._timeouts.silence_s)

    def _enter(self, phase: ProcessPhase, detail: str) -> None:
        if phase is not ProcessPhase.READY:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = self._clock.now()
        self.phase, self.detail = phase, detail
        self._context.recorder.changed.ring()

    async def stop(self) -> None:
        """Call this after `run` was cancelled or has returned. Withdraws the process first: it may have been announced."""
        await self._lost()
        if self.handle is not None:
            await self.handle.stop()
        if self.handle is None or self.phase is ProcessPhase.STARTING:
            # An earlier controller's process, which was not found yet, or could not be reached to say whether it may be adopted.
            await self._context.launcher.end(self.name)
        self._ended("")

    def _ended(self, reason: str) -> None:
        self._enter(ProcessPhase.STOPPED, reason)
        self._settled.set()

    def report(self, what: str, fraction: float) -> None:
        self.progress.report(what, fraction)
        self._events.progress(self.name, what, fraction)
