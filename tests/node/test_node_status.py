"""To which routers a node reports, and when it counts a router as lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from tandem.node.status import Routers
from tandem.wire.errors import NodeLost

SILENCE_S = 10.0


class Message(msgspec.Struct):
    number: int = 0


class World:
    """A fake line and clock around `Routers`."""

    malformed = 0
    died = None

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.forgotten: list[str] = []
        self.gone: set[str] = set()
        self.lost: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.routers = Routers(
            self, self.status, self.lost.append, period_s=0.001, silence_s=SILENCE_S, clock=lambda: self.now
        )

    def status(self) -> Message:
        self.meanwhile()
        return Message()

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        if endpoint in self.gone:
            raise NodeLost(f"{endpoint} does not read")
        self.told.append(endpoint)

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
