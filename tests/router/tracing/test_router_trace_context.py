"""W3C trace context, by the standard's own examples and rules."""

from __future__ import annotations

import pytest

from tandem.router.tracing.record import parse_context
from tandem.router.tracing.traces import READINGS, Clocks
from tandem.wire.tracing import ClockReading

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_callers_context_is_carried_on() -> None:
    context = parse_context(f"00-{TRACE}-{PARENT}-01".encode(), b"congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")
    assert context is not None
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, PARENT, True)
    assert context.state == "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
    unsampled = parse_context(f"00-{TRACE}-{PARENT}-00".encode())
    assert unsampled is not None
    assert not unsampled.sampled


def test_a_later_version_may_say_more_and_flags_may_be_more() -> None:
    later = parse_context(f"cc-{TRACE}-{PARENT}-03-what-the-future-will-be-like".encode())
    assert later is not None
    assert later.sampled


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-0",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-zz",
    ],
)
def test_what_is_no_context_is_ignored(parent: str) -> None:
    assert parse_context(parent.encode()) is None


def test_a_state_too_long_to_have_to_be_carried_is_not() -> None:
    context = parse_context(f"00-{TRACE}-{PARENT}-01".encode(), b"a=" + b"x" * 600)
    assert context is not None
    assert context.state == ""


class TestClocks:
    def reading(self, clocks: Clocks, asked: float, heard: float, said: float, epoch: int = 1) -> None:
        clocks.heard(ClockReading("n", epoch, asked, said), heard)

    def test_the_shortest_trip_counts(self) -> None:
        clocks = Clocks()
        assert clocks.offset("n", 1) is None
        self.reading(clocks, 10.0, 12.0, 511.9)
        self.reading(clocks, 20.0, 20.002, 520.0015)
        self.reading(clocks, 30.0, 30.5, 530.4)
        offset = clocks.offset("n", 1)
        assert offset is not None
        assert offset.seconds == pytest.approx(500.0005)
        assert offset.error_s == pytest.approx(0.001)

    def test_clocks_that_may_be_one_are_one(self) -> None:
        clocks = Clocks()
        self.reading(clocks, 10.0, 10.002, 10.0002)
        self.reading(clocks, 11.0, 11.004, 11.0039)
        offset = clocks.offset("n", 1)
        assert offset is not None
        assert (offset.seconds, offset.error_s) == (0.0, 0.0)

    def test_a_restarted_node_has_another_clock_and_an_answer_from_the_future_is_none(self) -> None:
        clocks = Clocks()
        self.reading(clocks, 10.0, 9.0, 100.0)
        assert clocks.offset("n", 1) is None
        self.reading(clocks, 10.0, 10.1, 100.0, epoch=2)
        assert clocks.offset("n", 1) is None
        clocks.forget("n", 2)
        assert clocks.offset("n", 2) is None

    def test_old_readings_are_forgotten(self) -> None:
        clocks = Clocks()
        self.reading(clocks, 0.0, 0.001, 70.0)
        for at in range(READINGS):
            self.reading(clocks, at + 1.0, at + 1.1, at + 101.05)
        offset = clocks.offset("n", 1)
        assert offset is not None
        assert offset.error_s == pytest.approx(0.05)
