"""A virtual clock runs timers as a real one does, and in the same order in every run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import InternalError
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


def test_a_callback_that_fails_ends_the_run_with_its_error_and_so_does_waiting_for_what_never_happens() -> None:
    loop = VirtualLoop()
    ran: list[float] = []
    loop.call_at(1.0, [].pop)
    loop.call_at(2.0, ran.append, 2.0)
    with pytest.raises(IndexError):
        loop.run_forever()
    loop.close()
    assert ran == []
    loop = VirtualLoop()
    for _ in range(300):
        loop.call_at(1.0, loop.stop).cancel()
    with pytest.raises(InternalError, match="never happens"):
        loop.run_until_complete(loop.create_future())
    loop.close()
