"""A clock that jumps runs its timers as life would, and every time in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.simulator.clock import VirtualLoop


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set(timers: list[tuple[int, bool]]) -> None:
    loop = VirtualLoop()
    ran: list[tuple[int, int]] = []
    handles = [loop.call_at(float(when), ran.append, (when, index)) for index, (when, _) in enumerate(timers)]
    for handle, (_, cancelled) in zip(handles, timers, strict=True):
        if cancelled:
            handle.cancel()
    loop.call_at(4.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert ran == sorted((when, index) for index, (when, cancelled) in enumerate(timers) if not cancelled)
