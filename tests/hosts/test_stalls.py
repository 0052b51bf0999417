"""What of a gap is the machine's."""

from __future__ import annotations

import os

from stalls import Waiting, waits_of


def test_what_a_thread_waited_counts_between_the_looks_around_a_gap() -> None:
    thread = Waiting()
    for at, waited in ((0.0, 1.0), (1.0, 1.0), (2.0, 1.6), (3.0, 1.6), (4.0, 4.0)):
        thread.note(at, waited)
    assert thread.between(0.0, 1.0) == 0.0
    assert round(thread.between(1.2, 1.9), 6) == 0.6
    assert thread.between(2.2, 2.8) == 0.0
    assert thread.between(3.1, 3.2) < 0.11, "never longer than the gap itself"
    assert Waiting().between(0.0, 9.0) == 0.0


def test_the_kernel_s_count_is_of_every_thread_and_of_no_process_that_has_ended() -> None:
    own = waits_of(os.getpid())
    assert f"{os.getpid()}/{os.getpid()}" in own
    assert all(seconds >= 0 for seconds in own.values())
    assert waits_of(2**22 + 1) == {}
