"""To which routers a node reports, and when it counts a router as lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from tandem.base.errors import NodeLost
from tandem.node.routers import Routers
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import NodeCounters, NodeStatus

SILENCE_S = 10.0


class Message(msgspec.Struct):
    number: int = 0


class World:
    """A fake line and clock around `Routers`."""

    malformed = 0
    died = None

    def __init__(self, period_s: float = 0.001) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.messages: list[msgspec.Struct] = []
        self.forgotten: list[str] = []
        self.gone: set[str] = set()
        self.lost: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.routers = Routers(
            self, self.status, self.lost.append, period_s=period_s, silence_s=SILENCE_S, clock=lambda: self.now
        )

    def status(self) -> NodeStatus:
        self.meanwhile()
        counters = NodeCounters(steps=len(self.told))
        return NodeStatus("n", Role.DECODE, 1, NodeState.READY, 9, 9, 0, 0, 0, 0, 0, 0.0, counters)

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        if endpoint in self.gone:
            raise NodeLost(f"{endpoint} does not read")
        self.told.append(endpoint)
        self.messages.append(message)

    def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)


def test_one_that_is_silent_for_too_long_is_lost_once_and_no_connection_to_it_is_kept() -> None:
    world = World()
    world.routers.heard("a")
    world.now = SILENCE_S + 1
    world.routers.heard("b")
    world.routers.report()
    world.routers.report()
    assert (world.lost, world.forgotten, world.told) == (["a"], ["a"], ["b", "b"])


def test_one_that_does_not_read_is_lost_and_told_nothing_until_it_is_heard_again() -> None:
    world = World()
    world.routers.heard("a")
    world.gone.add("a")
    world.routers.tell("a", Message())
    world.gone.clear()
    world.routers.tell("a", Message())
    assert (world.lost, world.forgotten, world.told) == (["a"], ["a"], [])
    assert world.routers.heard("a"), "it is a new one"
    world.routers.tell("a", Message())
    assert world.told == ["a"]


def test_one_that_speaks_up_just_before_it_would_be_lost_is_not() -> None:
    world = World()
    for name in ("other", "a"):
        world.routers.heard(name)
    world.now = SILENCE_S + 1
    world.routers.heard("other")
    world.meanwhile = lambda: world.routers.heard("a")
    world.routers.report()
    assert world.lost == []


def test_a_status_that_could_not_be_told_is_not_the_last() -> None:
    world = World()
    world.routers.heard("a")
    told_again = threading.Event()

    def fails_once() -> None:
        world.meanwhile = told_again.set
        raise OSError("too many open files")

    world.meanwhile = fails_once
    world.routers.start()
    assert told_again.wait(5)
    world.routers.stop()


@pytest.mark.parametrize(("period_s", "told"), [(0.25, [True, False, False, False] * 2), (3.0, [True] * 3)])
def test_counters_are_in_the_first_report_and_in_one_every_second(period_s: float, told: list[bool]) -> None:
    world = World(period_s=period_s)
    world.routers.heard("a")
    for _ in told:
        world.routers.report()
    has_counters = [isinstance(each, NodeStatus) and each.counters is not None for each in world.messages]
    assert has_counters == told


def test_a_router_that_is_new_is_told_the_counters_at_once() -> None:
    world = World(period_s=0.25)
    world.routers.heard("a")
    world.routers.report()
    world.routers.report()
    world.routers.heard("b")
    world.routers.tell_status("b")
    newest = world.messages[-1]
    assert world.told[-1] == "b"
    assert isinstance(newest, NodeStatus)
    assert newest.counters is not None
