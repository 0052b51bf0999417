"""The thread that steps the engine, and the mailbox that feeds it.

The loop steps while there is work and sleeps on its mailbox otherwise. It polls only one thing: a connector that has asked to be
asked again. It handles everything that arrives during a step (requests, cancellations, a connector's wake) before the next step.
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
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from tandem.engine.contract import NodeEngine
from tandem.machine.resources import bind, states_of_threads
from tandem.wire.lines import Position
from tandem.wire.requests import TokenChunk, ToNode

logger = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT", contravariant=True)


class Mailbox(Generic[T]):
    """A queue with many writing threads and one reading thread. `wake` makes a waiting `take` return without an item."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def wake(self) -> None:
        self._queue.put(None)

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def take(self, wait_s: float) -> list[T]:
        """Returns all queued items. If there are none, waits up to `wait_s` for the first one; may return an empty list."""
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
    """A router has been silent for too long, does not read, or was replaced: its requests no longer have an owner."""

    reply_to: str


@dataclasses.dataclass(slots=True, frozen=True)
class ListRequests:
    """Tell the router which of its requests this node holds. Its messages up to `position` precede this item in the mailbox."""

    reply_to: str
    position: Position


@dataclasses.dataclass(slots=True, frozen=True)
class Drain:
    """The node drains: end the checks and pins that would keep blocks. The node's state already refuses new requests."""


@dataclasses.dataclass(slots=True, frozen=True)
class ResetCache:
    """Forget all cached KV, in every tier."""

    done: threading.Event


@dataclasses.dataclass(slots=True, frozen=True)
class SetAdapters:
    """Serve the adapters in `read` and the served ones whose names are in `kept`, and no others."""

    read: list[Any]  # by the engine's book of adapters
    kept: frozenset[str]
    done: Future[None]  # fails with a ConfigurationError, and nothing has changed, if the engine does not take one


@dataclasses.dataclass(slots=True, frozen=True)
class InStep:
    """Something else that is done in the step thread. An error of it ends the node."""

    run: Callable[[], None]


Item = ToNode | RouterLost | ListRequests | Drain | ResetCache | SetAdapters | InStep


class LoopHost(Protocol[ItemT]):
    """The part that the loop does not know: what an item means, and where a step's results go. All calls come from the step thread."""

    def handle(self, item: ItemT) -> None:
        """Handles an item from the mailbox, between two steps."""

    def publish(self, updates: list[TokenChunk]) -> None: ...

    def before_step(self, now: float) -> None:
        """Called once per turn of the loop, before the step, to enforce deadlines."""

    def after_step(self, progressed: bool) -> None:
        """Called once per turn, after its results are published. If not `progressed`, the loop sleeps next."""

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until `before_step` next has something to do if no item arrives; None: never."""

    def failed(self, error: BaseException) -> None:
        """The loop has ended because of `error`. This is its last call."""


class EngineLoop(Generic[T]):
    """Owns the step thread. An exception out of a step ends the thread: the engine's state is unknown then, and an
    unknown state must not answer a request. The host fails every request, and the node is replaced."""

    _IDLE_WAIT_S = 3600.0
    # A connector that could not answer yet is asked again after this time, unless it wakes the loop earlier.
    _ASK_AGAIN_S = 0.005
    _LONG_STEP_S = 20.0

    def __init__(
        self,
        engine: NodeEngine,
        mailbox: Mailbox[T],
        host: LoopHost[T],
        clock: Callable[[], float] = time.monotonic,
        cores: Sequence[int] = (),
    ) -> None:
        """`cores`: the cores that the step thread is bound to; empty: any core."""
        self._cores = cores
        self._engine = engine
        self._mailbox = mailbox
        self._host = host
        self._clock = clock
        self._stopping = threading.Event()
        self._step_started: float | None = None
        self._told_of: float | None = None  # the start of the step that the log has reported as too long
        self._rests = True  # nothing was done since the host last looked at its engine
        self.steps, self.step_seconds = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Lets a running step finish, and waits up to `timeout_s`. Returns True when the thread has ended."""
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

    @property
    def has_read_all(self) -> bool:
        """Whether everything that has come by now was read, and nothing runs: what the last turn saw still holds."""
        return self._rests and self._mailbox.is_empty

    def watch_step(self) -> None:
        """Logs the stack of a step that has run for `_LONG_STEP_S`, once per step. Called periodically from another thread."""
        started = self._step_started
        if started is None or started == self._told_of or self._clock() - started < self._LONG_STEP_S:
            return
        self._told_of = started
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "nowhere in Python\n"
        threads = ", ".join(f"{count} × {state}" for state, count in states_of_threads().most_common())
        logger.warning("a step has run for %.0f s, and is at\n%sThreads: %s", self._LONG_STEP_S, where, threads)

    def _run(self) -> None:
        try:
            if self._cores:
                bind([threading.get_native_id()], self._cores)
            wait_s: float | None = self._wait(self._IDLE_WAIT_S)
            while wait_s is not None:
                wait_s = self.turn(wait_s)
        except BaseException as error:
            logger.exception("the engine's step failed; this node can no longer answer")
            self._host.failed(error)

    def turn(self, wait_s: float) -> float | None:
        """Waits up to `wait_s` for the first item, handles what has arrived, and runs one step. Returns how long the next turn may
        wait; None: the loop was stopped. The step thread calls it again and again."""
        if self._stopping.is_set():
            return None
        items = self._mailbox.take(wait_s)
        self._rests = False
        for item in items:
            self._host.handle(item)
        if self._stopping.is_set():
            return None
        return self._wait(self._step())

    def _wait(self, longest: float) -> float:
        if longest == 0:
            return 0.0
        due = self._host.seconds_until_due(self._clock())
        return longest if due is None else min(max(due, 0.001), longest)

    def _step(self) -> float:
        """Runs one step and returns how long the loop may sleep before its next turn."""
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
        self._rests = not result.progressed
        if result.progressed:
            return 0.0
        return self._ASK_AGAIN_S if result.ask_again else self._IDLE_WAIT_S
