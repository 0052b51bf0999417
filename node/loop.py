"""The thread that steps the engine, and the mailbox that feeds it.

The loop steps while there is something to do and sleeps on its mailbox otherwise; it polls nothing but a connector that
asked to be asked again. What comes in between two steps (requests, cancellations, a connector's wake) is taken up
before the next one.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tandem.engine.core import Engine
from tandem.engine.structured.desk import GrammarReady
from tandem.machine.resources import bind, states_of_threads
from tandem.node.encoders import RowsCame
from tandem.wire.lines import Position
from tandem.wire.requests import TokenChunk, ToNode

if TYPE_CHECKING:
    from tandem.engine.model.lora.folder import Adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT", contravariant=True)


class Mailbox(Generic[T]):
    """Many threads put, one takes. `wake` makes a waiting taker return without an item."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def wake(self) -> None:
        self._queue.put(None)

    def take(self, wait_s: float) -> list[T]:
        """Everything that is there; when nothing is, waits up to `wait_s` for the first."""
        items: list[T] = []
        try:
            first = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
            while True:
                if first is not None:
                    items.append(first)
                first = self._queue.get_nowait()
        except queue.Empty:
            return items


@dataclasses.dataclass(slots=True, frozen=True)
class RouterLost:
    """A router has been silent for too long, or does not read: its requests no longer have an owner."""

    reply_to: str


@dataclasses.dataclass(slots=True, frozen=True)
class ListRequests:
    """Tell the router what it has here, now that its messages up to `position` are acted on."""

    reply_to: str
    position: Position


@dataclasses.dataclass(slots=True, frozen=True)
class Drain:
    """Refuse what is new from now on."""


@dataclasses.dataclass(slots=True, frozen=True)
class ResetCache:
    """Forget all cached KV, in every tier."""

    done: threading.Event


@dataclasses.dataclass(slots=True, frozen=True)
class SetAdapters:
    """Serve these adapters, and those that are served under the names `kept`; no others."""

    read: list[Adapter]
    kept: frozenset[str]
    done: threading.Event


@dataclasses.dataclass(slots=True, frozen=True)
class RanksLost:
    """The node's other ranks have been ended, all of them."""

    why: str


Item = (
    ToNode
    | RouterLost
    | ListRequests
    | Drain
    | ResetCache
    | SetAdapters
    | RanksLost
    | GrammarReady
    | RowsCame
)


class LoopHost(Protocol[ItemT]):
    """What the loop does not know: what an item means, and who wants to hear of a step's results."""

    def handle(self, item: ItemT) -> None:
        """An item from the mailbox, in the step thread, between two steps."""
        ...

    def publish(self, updates: list[TokenChunk]) -> None: ...

    def before_step(self, now: float) -> None:
        """Called once per turn of the loop, before the step: deadlines and the like."""
        ...

    def after_step(self, progressed: bool) -> None:
        """Called once per turn, after its results are published; the loop sleeps next when not `progressed`."""
        ...

    def seconds_until_due(self, now: float) -> float | None:
        """When `before_step` next has something to do, if nothing arrives; None: never."""
        ...

    def failed(self, error: BaseException) -> None:
        """The loop has ended because of `error`. Called once, from the step thread, last of all."""
        ...


class EngineLoop(Generic[T]):
    """Owns the step thread. An exception out of a step ends it: the engine's state is unknown then, and an
    unknown state must not answer a request. The host fails every request, and the node is replaced."""

    _IDLE_WAIT_S = 3600.0
    # A connector that could not say yet is asked this often, unless it wakes the loop before.
    _ASK_AGAIN_S = 0.005
    _LONG_STEP_S = 20.0

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox[T],
        host: LoopHost[T],
        clock: Callable[[], float] = time.monotonic,
        cores: Sequence[int] = (),
    ) -> None:
        """`cores`: where its thread is to run; empty: anywhere."""
        self._cores = cores
        self._engine = engine
        self._mailbox = mailbox
        self._host = host
        self._clock = clock
        self._stopping = threading.Event()
        self._step_started: float | None = None
        self._told_of: float | None = None  # the step that the log has been told of
        self.steps = 0
        self.step_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """True when the thread has ended. A step under way is finished first."""
        self._stopping.set()
        self._mailbox.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def step_age(self) -> float:
        """Seconds that the current step has been running; 0 between steps and when idle."""
        started = self._step_started
        return 0.0 if started is None else max(0.0, self._clock() - started)

    def watch_step(self) -> None:
        """Says once of a step that takes very long where it is. Called from another thread, again and again."""
        started = self._step_started
        if started is None or started == self._told_of or self._clock() - started < self._LONG_STEP_S:
            return
        self._told_of = started
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "nowhere in Python\n"
        threads = ", ".join(f"{count} × {state}" for state, count in states_of_threads().most_common())
        logger.warning(
            "a step has run for %.0f s, and is at\n%sThreads: %s", self._LONG_STEP_S, where, threads
        )

    def _run(self) -> None:
        try:
            if self._cores:
                bind([threading.get_native_id()], self._cores)
            longest_wait = self._IDLE_WAIT_S
            while not self._stopping.is_set():
                for item in self._mailbox.take(self._wait(longest_wait)):
                    self._host.handle(item)
                if self._stopping.is_set():
                    return
                longest_wait = self._turn()
        except BaseException as error:
            logger.exception("the engine's step failed; this node can no longer answer")
            self._host.failed(error)

    def _wait(self, longest: float) -> float:
        if longest == 0:
            return 0.0
        due = self._host.seconds_until_due(self._clock())
        return longest if due is None else min(max(due, 0.001), longest)

    def _turn(self) -> float:
        """How long the loop may sleep before its next turn."""
        started = self._clock()
        self._host.before_step(started)
        self._step_started = started
        try:
            result = self._engine.step()
        finally:
            self._step_started = None
        if result.progressed:
            self.steps += 1
            self.step_seconds += self._clock() - started
        if result.updates:
            self._host.publish(result.updates)
        self._host.after_step(result.progressed)
        if result.progressed:
            return 0.0
        return self._ASK_AGAIN_S if result.ask_again else self._IDLE_WAIT_S
