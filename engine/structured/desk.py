"""Requests that wait until their grammar is compiled, while all others go on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec

from tandem.engine.structured.grammars import Grammars
from tandem.wire.errors import DeadlineExceeded, InternalError, TandemError

_THREADS = 2  # so that one costly grammar does not hold up all others


class GrammarReady(msgspec.Struct, frozen=True):
    """For the step thread: a request need wait no longer."""

    request_id: str
    error: TandemError | None  # why it cannot run


class GrammarDesk:
    """Everything but its threads' own work happens in the step thread. Each request that `begin` took is answered
    once: by a GrammarReady, by `overdue`, or by `forget`, whichever is first. Its grammar is compiled only if none of the
    latter came before its turn: when too many arrive at once, those that are too late fail, not every one after them."""

    def __init__(self, grammars: Grammars, timeout_s: float, tell: Callable[[GrammarReady], None]) -> None:
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._tell = tell
        self._deadlines: dict[str, float] = {}  # in order: all wait equally long
        self._work: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        for index in range(_THREADS):
            threading.Thread(target=self._compile, name=f"grammar-{index}", daemon=True).start()

    def must_wait(self, grammar: str) -> bool:
        return not self._grammars.is_prepared(grammar)

    def begin(self, request_id: str, grammar: str, now: float) -> None:
        self._deadlines[request_id] = now + self._timeout_s
        self._work.put((request_id, grammar))

    def forget(self, request_id: str) -> bool:
        """True if the request was still waiting."""
        return self._deadlines.pop(request_id, None) is not None

    def overdue(self, now: float) -> list[tuple[str, TandemError]]:
        """Requests whose grammar takes too long; they are forgotten."""
        found: list[tuple[str, TandemError]] = []
        while self._deadlines:
            request_id, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                break
            del self._deadlines[request_id]
            error = DeadlineExceeded(f"the answer's grammar was not compiled within {self._timeout_s:g} s")
            found.append((request_id, error))
        return found

    def seconds_until_due(self, now: float) -> float | None:
        return next(iter(self._deadlines.values())) - now if self._deadlines else None

    def close(self) -> None:
        for _ in range(_THREADS):
            self._work.put(None)

    def _compile(self) -> None:
        while (work := self._work.get()) is not None:
            request_id, grammar = work
            if request_id not in self._deadlines:
                continue  # its requests have ended, and others wait
            self._tell(GrammarReady(request_id, self._attempt(grammar)))

    def _attempt(self, grammar: str) -> TandemError | None:
        try:
            self._grammars.prepare(grammar)
        except TandemError as error:
            return error
        except BaseException as error:  # a panic of the library is no Exception, and must not end the thread
            return InternalError(f"compiling the answer's grammar failed: {type(error).__name__}: {error}")
        return None
