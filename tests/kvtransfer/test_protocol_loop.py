from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.protocol.commands import CancelReceive
from tandem.kvtransfer.protocol.endpoint import POLL_MAX_S, POLL_MIN_S, ProtocolLoop
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.transport import Activity
from tandem.wire.handoff import CancelTransfer, Envelope
from tests.waiting import until

SETTINGS = ProtocolSettings.from_config(TransferConfig())


class FakeEndpoint:
    """Counts the loop's calls."""

    def __init__(self) -> None:
        self.is_idle = True
        self.seconds_until_ask = 5.0
        self.pumped = 0
        self.ticked = 0
        self.activity = Activity.NONE
        self.handled: list[object] = []
        self.closes_after = 0
        self.error: Exception | None = None
        self._changed = threading.Condition()

    def note(self, item: object) -> None:
        with self._changed:
            self.handled.append(item)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.handled) >= count, 5)

    def receive(self, message: object) -> None:
        self.note(message)
        if self.error:
            raise self.error

    def execute(self, command: object) -> None:
        self.note(command)
        if self.error:
            raise self.error

    def pump(self) -> Activity:
        self.pumped += 1
        return self.activity

    def tick(self) -> None:
        self.ticked += 1

    def shutdown(self) -> bool:
        self.closes_after -= 1
        return self.closes_after < 0


class RunningLoop:
    def __init__(self) -> None:
        self.died = threading.Event()
        self.endpoint = FakeEndpoint()
        self.loop = ProtocolLoop("test", SETTINGS, time.monotonic, self.died.set)

    def start(self) -> None:
        endpoint: Any = self.endpoint
        self.loop.start(endpoint)

    def nudge(self) -> None:
        """Waits for one round trip through the thread."""
        count = len(self.endpoint.handled)
        self.loop.command([CancelReceive("r")])
        self.endpoint.wait_for(count + 1)


@pytest.fixture
def running():  # type: ignore[no-untyped-def]
    running = RunningLoop()
    running.start()
    yield running
    running.loop.stop(0.1)


MESSAGE = CancelTransfer(Envelope("n", 1, 2, "tcp://x"), "t")


def test_what_came_before_the_start_is_handled_in_order() -> None:
    running = RunningLoop()
    running.loop.message(MESSAGE)
    running.loop.command([CancelReceive("a"), CancelReceive("b")])
    running.start()
    running.endpoint.wait_for(3)
    assert running.endpoint.handled == [MESSAGE, CancelReceive("a"), CancelReceive("b")]
    running.loop.stop(0.1)


def test_an_idle_loop_does_nothing(running: RunningLoop) -> None:
    running.nudge()
    time.sleep(0.1)
    running.nudge()
    assert running.endpoint.pumped <= 2  # once for each thing that came


def test_deadlines_are_looked_at_while_there_are_any(running: RunningLoop) -> None:
    running.endpoint.is_idle = False
    running.nudge()
    began, ticked = time.monotonic(), running.endpoint.ticked
    until(lambda: running.endpoint.ticked >= ticked + 4)
    assert time.monotonic() - began >= 3 * SETTINGS.tick_s


def test_what_is_in_flight_is_polled_at_intervals_that_grow() -> None:
    loop = ProtocolLoop("moving", SETTINGS, lambda: 100.0, on_failure=lambda: None)
    endpoint: Any = FakeEndpoint()
    endpoint.activity = Activity.IN_FLIGHT
    waits = [loop.turn(endpoint, 0.0) for _ in range(6)]
    assert waits == [min(POLL_MIN_S * 2**turn, POLL_MAX_S) for turn in range(6)]
    endpoint.activity = Activity.NONE
    loop.turn(endpoint, 0.0)
    endpoint.activity = Activity.IN_FLIGHT
    assert loop.turn(endpoint, 0.0) == POLL_MIN_S


def test_a_peers_message_that_fails_is_counted_and_the_next_one_handled(running: RunningLoop) -> None:
    running.endpoint.error = RuntimeError("a bug")
    for _ in range(3):
        running.loop.message(MESSAGE)
    running.endpoint.wait_for(3)
    running.endpoint.error = None
    running.nudge()
    assert running.loop.handler_errors == 3
    assert running.loop.failure is None


def test_a_bug_of_our_own_ends_the_thread_and_is_told(running: RunningLoop) -> None:
    running.endpoint.error = RuntimeError("a bug")
    running.loop.command([CancelReceive("r")])
    assert running.died.wait(5)
    assert str(running.loop.failure) == "a bug"


def test_however_much_peers_say_blocks_are_moved_and_deadlines_looked_at() -> None:
    running = RunningLoop()
    running.endpoint.is_idle = False

    def receive(message: object) -> None:
        if running.endpoint.ticked < 3:
            running.loop.message(MESSAGE)
        else:
            running.endpoint.note(message)

    running.endpoint.receive = receive  # type: ignore[method-assign]
    running.loop.message(MESSAGE)
    running.start()
    running.endpoint.wait_for(1)
    assert running.endpoint.pumped >= 3
    running.loop.stop(0.1)


def test_stopping_waits_for_what_is_in_flight_and_no_longer_than_allowed() -> None:
    running = RunningLoop()
    running.endpoint.closes_after = 3
    running.start()
    running.loop.stop(5.0)
    assert running.endpoint.closes_after == -1

    running = RunningLoop()
    running.endpoint.closes_after = 1 << 30
    running.start()
    began = time.monotonic()
    running.loop.stop(0.1)
    assert time.monotonic() - began < 2
    running.loop.stop(0.1)  # idempotent


def test_what_peers_say_while_the_loop_stops_is_heard() -> None:
    """It may be what the end waits for."""
    running = RunningLoop()
    endpoint = running.endpoint

    def shutdown() -> bool:
        if not endpoint.handled:
            running.loop.message(MESSAGE)
        return bool(endpoint.handled)

    endpoint.shutdown = shutdown  # type: ignore[method-assign]
    running.start()
    running.loop.stop(5.0)
    assert endpoint.handled == [MESSAGE]


def test_a_message_does_not_put_off_the_question_to_peers_whose_kv_is_here() -> None:
    now = 100.0
    loop = ProtocolLoop("quiet", SETTINGS, lambda: now, on_failure=lambda: None)
    endpoint: Any = FakeEndpoint()
    assert loop.turn(endpoint, 0.0) == pytest.approx(5.0)
    now += 4.9
    endpoint.seconds_until_ask = 0.1
    loop.message(MESSAGE)
    assert loop.turn(endpoint, 0.0) == pytest.approx(0.1)
    assert endpoint.handled == [MESSAGE]
