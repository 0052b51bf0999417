"""Finds out how much of a prefix the store has, while the request that needs it waits; and looks at the era every few seconds.

A prefix is stored from its beginning, so a few requests find its end: of the first chunk, of the last one, and then by halves. If the
store has since deleted an earlier one, the load fails, and the prompt is computed.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tandem.base.errors import InternalError
from tandem.kvtransfer.objects.chunks import ChunkStore
from tandem.kvtransfer.objects.client import StoreError
from tandem.kvtransfer.objects.eras import LOOK_S, REQUEST_S, Eras
from tandem.kvtransfer.offload.fetches import Rate
from tandem.kvtransfer.offload.policies import Key

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


THREADS = 4  # inquiries at a time; each is a few round trips
ANSWER_S = 1.0  # a request waits no longer for an answer


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The store has the first `count` of these keys."""

    era: str
    keys: Sequence[Key]
    count: int


class Inquiries:
    """The step thread asks, and takes what was found."""

    def __init__(
        self, store: ChunkStore, eras: Eras, wake: Callable[[], None], failed: Callable[[StoreError], None]
    ) -> None:
        """`failed` is called in one of the threads: the store does not work."""
        self._store = store
        self._eras = eras
        self._wake = wake
        self._failed = failed
        self._workers = Workers(THREADS, "kv-objects-ask")
        self._found: deque[StoredPrefix] = deque()
        self._bug: BaseException | None = None
        self._answers = Rate(time.monotonic)
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._run, name="kv-objects-watch", daemon=True)
        self._watch.start()

    # ── what the step thread calls ──

    def ask(self, keys: Sequence[Key]) -> float:
        """Begins to find out how many of these keys the store has. Returns until when an answer may come."""
        until = time.monotonic() + ANSWER_S
        self._workers.begin(lambda: self._count(keys, until)).add_done_callback(self._book)
        return until

    def take(self) -> list[StoredPrefix]:
        if self._bug is not None:
            raise InternalError("a thread that asks an object store died") from self._bug
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    @property
    def answer_s(self) -> float:
        """How long an answer took lately; 0: it is not known."""
        return 1 / rate if (rate := self._answers.value) else 0.0

    # ── the threads ──

    def _count(self, keys: Sequence[Key], until: float) -> None:
        count, began, era = 0, time.monotonic(), self._eras.open_now
        try:
            if era and began < until:
                count = self._count_in(era, keys, until)
                self._answers.observe(1, time.monotonic() - began)
        except StoreError as error:
            self._failed(error)
        self._found.append(StoredPrefix(era, keys, count))
        self._wake()

    def _count_in(self, era: str, keys: Sequence[Key], until: float) -> int:
        """Asks until `until`, and returns what it knows by then. Only a store that does not answer one request in its time fails."""
        if not self._has(era, keys[0]):
            return 0
        if time.monotonic() < until and self._has(era, keys[-1]):
            return len(keys)
        low, high = 1, len(keys) - 1
        while low < high and time.monotonic() < until:
            middle = (low + high + 1) // 2
            if self._has(era, keys[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def _has(self, era: str, key: Key) -> bool:
        return self._store.has(era, key, time.monotonic() + REQUEST_S)

    def _book(self, done: Future[None]) -> None:
        if (error := done.exception()) is not None:
            self._bug = error
            self._wake()

    def _run(self) -> None:
        try:
            while not self._closing.wait(LOOK_S):
                if self._eras.name:
                    self._look()
        except BaseException as error:
            self._bug = error
            self._wake()

    def _look(self) -> None:
        try:
            self._eras.look()
        except StoreError as error:
            self._failed(error)
        if self._eras.distrusted:
            self._wake()

    def close(self) -> None:
        self._closing.set()
        self._workers.close()
