"""Threads that do one thing after another, and whose results are waited for elsewhere. They do not keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Workers:
    def __init__(self, count: int, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Has a thread do this. What it raises is the result's."""
        result: Future[T] = Future()

        def do() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        self._work.put(do)
        return result

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """The threads end after what was begun."""
        for _ in range(self._count):
            self._work.put(None)
