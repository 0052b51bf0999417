"""Calls in threads of their own, which nothing waits for when the process ends, and which may go deep."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 512 << 20  # of addresses; what is not reached takes no memory

_starting = threading.Lock()


def in_own_thread(name: str, work: Callable[[], T], stack_bytes: int = 0) -> Future[T]:
    """Runs `work` in a plain daemon thread: a pool's threads are joined at exit, and neither a download nor an answer that does not come
    must delay that. `stack_bytes`: 0 for the usual stack."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # who no longer waits for it cancels only the wait

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # a library's panics are no Exceptions
            result.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if not stack_bytes:
        thread.start()
        return result
    with _starting:  # the size holds for every thread that is started meanwhile
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result


async def from_own_thread(name: str, work: Callable[[], T]) -> T:
    """Awaits `work` in such a thread. `asyncio.to_thread` would keep a command after Ctrl-C until `work` has ended."""
    return await asyncio.wrap_future(in_own_thread(name, work))


def in_deep_stack(work: Callable[[], T]) -> T:
    """Returns what `work` returns, for libraries that go as deep as a client's text says. A stack that overflows in native code ends the
    process, with all that it serves, and no limit on the text's length prevents it: a thread has 8 MiB, and a text of 100 KiB can name 3000
    rules that refer to one another."""
    return in_own_thread("deep-stack", work, STACK_BYTES).result()


def when_parent_ends(work: Callable[[], object]) -> None:
    """Runs this when the process that started this one has ended. Then standard input ends, on which that one never writes: what a
    signal ends cannot say so itself."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        work()

    in_own_thread("parent-watch", watch)
