"""Which part of a gap between tokens is the machine's fault."""

from __future__ import annotations

import os

from stalls import Thread, times_of, waited_by


def thread(*counts: tuple[float, float, float]) -> Thread:
    made = Thread()
    for at, ran, waited in counts:
        made.note(at, ran, waited)
    return made


def test_what_a_thread_waited_counts_between_the_looks_around_a_gap() -> None:
    one = thread((0.0, 0.0, 1.0), (1.0, 0.5, 1.0), (2.0, 0.6, 1.6), (3.0, 0.6, 1.6), (4.0, 0.7, 4.0))
    assert one.between(0.0, 1.0) == (0.5, 0.0)
    assert round(one.between(1.2, 1.9)[1], 6) == 0.6
    assert one.between(2.2, 2.8)[1] == 0.0
    assert one.between(3.1, 3.2)[1] < 0.11, "never longer than the gap itself"
    assert Thread().between(0.0, 9.0) == (0.0, 0.0)


def test_a_thread_that_does_nothing_but_wait_excuses_nothing() -> None:
    works = thread((0.0, 0.0, 0.0), (4.0, 3.0, 0.5))
    idles = thread((0.0, 0.0, 0.0), (4.0, 0.1, 3.9))
    assert waited_by([idles, works], 0.0, 4.0) == 0.5
    assert waited_by([], 0.0, 4.0) == 0.0


def test_the_kernel_s_count_is_of_every_thread_and_of_no_process_that_has_ended() -> None:
    own = times_of(os.getpid())
    assert os.getpid() in own
    assert all(ran >= 0 and waited >= 0 for ran, waited in own.values())
    assert times_of(2**22 + 1) == {}
