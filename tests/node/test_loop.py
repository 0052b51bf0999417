"""The step thread sleeps when there is nothing to do, wakes for any item, and never dies silently."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tandem.engine.core import StepResult
from tandem.node.loop import EngineLoop, Mailbox
from tests.loops import PATIENCE_S


class FakeEngine:
    """Progresses in a given number of steps, and counts all its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.progress_left = 0
        self.asks_again = False
        self.error: Exception | None = None
        self.stepped = threading.Semaphore(0)

    def step(self) -> StepResult:
        self.steps += 1
        if self.error is not None:
            raise self.error
        progressed = self.progress_left > 0
        self.progress_left -= progressed
        self.stepped.release()
        return StepResult([], progressed, ask_again=self.asks_again and not progressed)


class Host:
    def __init__(self) -> None:
        self.handled: list[str] = []
        self.on_handle: Callable[[str], None] = lambda item: None
        self.due: float | None = None
        self.failure: BaseException | None = None
        self.failed_event = threading.Event()
        self.later_s = 0.0  # how far the loop's clock is ahead of this machine's

    def clock(self) -> float:
        return time.monotonic() + self.later_s

    def handle(self, item: str) -> None:
        self.handled.append(item)
        self.on_handle(item)

    def publish(self, updates: list[object]) -> None: ...
    def before_step(self, now: float) -> None: ...
    def after_step(self, progressed: bool) -> None: ...

    def seconds_until_due(self, now: float) -> float | None:
        return self.due

    def failed(self, error: BaseException) -> None:
        self.failure = error
        self.failed_event.set()


@pytest.fixture
def parts():
    engine, mailbox, host = FakeEngine(), Mailbox(), Host()
    loop = EngineLoop(engine, mailbox, host, host.clock)  # type: ignore[arg-type]
    yield engine, mailbox, host, loop
    assert loop.stop(PATIENCE_S)


def test_a_mailbox_returns_everything_that_is_there_in_order():
    mailbox: Mailbox[int] = Mailbox()
    for i in range(5):
        mailbox.put(i)
    mailbox.wake()
    assert mailbox.take(0) == [0, 1, 2, 3, 4]
    assert mailbox.take(0) == []


def test_an_item_is_handled_before_the_next_step_and_steps_go_on_while_there_is_progress(parts):
    engine, mailbox, host, loop = parts

    def handle(item: str) -> None:
        engine.progress_left = 3

    host.on_handle = handle
    loop.start()
    mailbox.put("a")
    for _ in range(4):  # three steps progress; the fourth finds nothing to do
        assert engine.stepped.acquire(timeout=PATIENCE_S)
    assert host.handled == ["a"]
    assert loop.steps == 3


def test_an_idle_loop_does_not_step(parts):
    engine, mailbox, _, loop = parts
    loop.start()
    mailbox.wake()
    assert engine.stepped.acquire(timeout=PATIENCE_S)
    assert not engine.stepped.acquire(timeout=0.1)
    assert engine.steps == 1


def test_a_step_that_asks_to_be_asked_again_is_followed_by_another_soon(parts):
    engine, mailbox, _, loop = parts
    engine.asks_again = True
    loop.start()
    mailbox.wake()
    for _ in range(3):
        assert engine.stepped.acquire(timeout=PATIENCE_S)
    engine.asks_again = False
    assert loop.steps == 0


def test_a_due_time_wakes_the_loop(parts):
    engine, _, host, loop = parts
    host.due = 0.01
    loop.start()
    assert engine.stepped.acquire(timeout=PATIENCE_S)


def test_a_step_that_raises_is_reported_once_and_ends_the_loop(parts):
    engine, mailbox, host, loop = parts
    engine.error = RuntimeError("boom")
    loop.start()
    mailbox.wake()
    assert host.failed_event.wait(PATIENCE_S)
    assert host.failure is engine.error
    loop.stop(PATIENCE_S)
    assert not loop.is_alive
    assert engine.steps == 1


def test_step_age_is_zero_when_idle_and_grows_while_a_step_runs(parts):
    engine, mailbox, _, loop = parts
    inside, leave = threading.Event(), threading.Event()

    def step() -> StepResult:
        inside.set()
        assert leave.wait(PATIENCE_S)
        return StepResult([], False)

    engine.step = step  # type: ignore[method-assign]
    assert loop.step_age() == 0.0
    loop.start()
    mailbox.wake()
    assert inside.wait(PATIENCE_S)
    first = loop.step_age()
    deadline = time.monotonic() + PATIENCE_S
    while loop.step_age() <= first and time.monotonic() < deadline:
        pass
    assert loop.step_age() > first
    leave.set()


def test_a_step_that_takes_very_long_is_told_once_with_where_it_is(parts, caplog):
    engine, mailbox, host, loop = parts
    begun, may_end = threading.Event(), threading.Event()

    def waits_for_what_never_comes() -> StepResult:
        begun.set()
        may_end.wait(PATIENCE_S)
        return StepResult([], False)

    engine.step = waits_for_what_never_comes
    loop.start()
    mailbox.wake()
    assert begun.wait(PATIENCE_S)
    loop.watch_step()
    host.later_s = 60.0
    loop.watch_step()
    loop.watch_step()
    may_end.set()
    (record,) = [one for one in caplog.records if "a step has run" in one.message]
    assert "in waits_for_what_never_comes" in record.message
    assert "Threads: " in record.message


def test_stopping_an_idle_loop_ends_its_thread_at_once(parts):
    _, _, _, loop = parts
    loop.start()
    assert loop.stop(PATIENCE_S)
    assert not loop.is_alive
