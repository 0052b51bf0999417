from __future__ import annotations

import threading

import pytest

from tandem.base.own_thread import STACK_BYTES, in_deep_stack


class Panic(BaseException):
    pass


def test_it_returns_and_raises_what_the_call_does() -> None:
    assert in_deep_stack(lambda: 3) == 3

    def panic() -> None:
        raise Panic("so")

    with pytest.raises(Panic, match="so"):
        in_deep_stack(panic)


def test_other_threads_keep_their_stacks() -> None:
    before = threading.stack_size()
    assert in_deep_stack(threading.stack_size) in (before, STACK_BYTES)
    assert threading.stack_size() == before
