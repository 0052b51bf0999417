"""Compiles grammars in threads of its own. Requests with a new grammar wait for it; all others go on."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from tandem.base.errors import DeadlineExceeded, InternalError, TandemError
from tandem.engine.model.runner import Grammars

_THREADS = 2  # so that one costly grammar does not delay all others


class GrammarReady(msgspec.Struct, frozen=True):
    """Tells the step thread that a request's grammar is compiled, or why it could not be."""

    request_id: str
    error: TandemError | None  # why it cannot run


class _Work:
    """What is to be compiled: one tenant's after another's, so that none waits for all of another's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: OrderedDict[str, deque[tuple[str, str]]] = OrderedDict()  # by tenant, in the order of their turns
        self._closed = False

    def put(self, tenant: str, request_id: str, grammar: str) -> None:
        with self._changed:
            self._lines.setdefault(tenant, deque()).append((request_id, grammar))
            self._changed.notify()

    def take(self) -> tuple[str, str] | None:
        """Waits for work. None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if self._closed:
                return None
            tenant, line = self._lines.popitem(last=False)
            work = line.popleft()
            if line:
                self._lines[tenant] = line  # for its next turn
            return work

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PendingGrammars:
    """Only the step thread calls its methods; `tell` is called from its own threads. Each request passed to `begin` ends once:
    with a GrammarReady, in `overdue`, or by `forget`, whichever is first. A grammar whose request has ended is not compiled, so
    when too many arrive at once, the overdue ones fail and those after them do not."""

    def __init__(self, grammars: Grammars, timeout_s: float, tell: Callable[[GrammarReady], None]) -> None:
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._tell = tell
        self._deadlines: dict[str, float] = {}  # in order, because all have the same timeout
        self._work = _Work()
        for index in range(_THREADS):
            threading.Thread(target=self._compile, name=f"grammar-{index}", daemon=True).start()

    def must_wait(self, grammar: str) -> bool:
        return not self._grammars.is_prepared(grammar)

    def begin(self, request_id: str, grammar: str, now: float, tenant: str = "") -> None:
        self._deadlines[request_id] = now + self._timeout_s
        self._work.put(tenant, request_id, grammar)

    def forget(self, request_id: str) -> bool:
        """The request has ended. Returns whether it was still waiting."""
        return self._deadlines.pop(request_id, None) is not None

    def overdue(self, now: float) -> list[tuple[str, TandemError]]:
        """Forgets the requests whose grammar was not compiled in time, and returns them with their errors."""
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
        self._work.close()

    def _compile(self) -> None:
        while (work := self._work.take()) is not None:
            request_id, grammar = work
            if request_id not in self._deadlines:
                continue  # the request has ended or is overdue
            self._tell(GrammarReady(request_id, self._attempt(grammar)))

    def _attempt(self, grammar: str) -> TandemError | None:
        try:
            self._grammars.prepare(grammar)
        except TandemError as error:
            return error
        except BaseException as error:  # the library's panics are no Exceptions, and must not end the thread
            return InternalError(f"compiling the answer's grammar failed: {type(error).__name__}: {error}")
        return None
