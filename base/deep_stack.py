"""Calls into libraries that go as deep as a client's text says.

A stack that overflows in native code ends the process, with all that it serves, and no limit on the text's length prevents it: a thread
has 8 MiB, and a text of 100 KiB can name 3000 rules that refer to one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 512 << 20  # of addresses; what is not reached takes no memory

_starting = threading.Lock()


def in_deep_stack(call: Callable[[], T]) -> T:
    """Calls it in a thread of its own, with a large stack, and returns what it returns. Raises what it raises."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # a library's panics are no Exceptions
            done.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _starting:  # the size holds for every thread that is started meanwhile
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()
