"""Compiles grammars in threads of its own. Requests with a new grammar wait for it; all others go on."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from tandem.base.errors import DeadlineExceeded, InternalError, TandemError
from tandem.engine.model.runner import Grammars

_THREADS = 4
_OF_ONE_TENANT = 2  # costly grammars of one tenant leave threads for others

Tell = Callable[[TandemError | None], None]
"""Tells that a request's grammar is compiled, or why it could not be."""


class _Asked(NamedTuple):
    tenant: str
    request_id: str
    grammar: str
    tell: Tell


class _Work:
    """What is to be compiled: one tenant's after another's, so that none waits for all of another's. A tenant has at most `_OF_ONE_TENANT`
    threads: some grammars take a minute, and no thread can be told to stop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: OrderedDict[str, deque[_Asked]] = OrderedDict()  # by tenant, in the order of their turns
        self._under_way: Counter[str] = Counter()  # by tenant
        self._closed = False

    def put(self, asked: _Asked) -> None:
        with self._changed:
            self._lines.setdefault(asked.tenant, deque()).append(asked)
            self._changed.notify()

    def take(self) -> _Asked | None:
        """Waits for work. The caller tells `done`. None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next() is not None)
            tenant = self._next()
            if self._closed or tenant is None:
                return None
            line = self._lines.pop(tenant)
            asked = line.popleft()
            if line:
                self._lines[tenant] = line  # for its next turn
            self._under_way[tenant] += 1
            return asked

    def _next(self) -> str | None:
        return next((tenant for tenant in self._lines if self._under_way[tenant] < _OF_ONE_TENANT), None)

    def done(self, tenant: str) -> None:
        with self._changed:
            self._under_way -= Counter([tenant])
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PendingGrammars:
    """Only the step thread calls its methods; `tell` is called from its own threads. Each request passed to `begin` ends once:
    with `tell`, in `overdue`, or by `forget`, whichever is first. A grammar whose request has ended is not compiled, so
    when too many arrive at once, the overdue ones fail and those after them do not."""

    def __init__(self, grammars: Grammars, timeout_s: float) -> None:
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._deadlines: dict[str, float] = {}  # in order, because all have the same timeout
        self._work = _Work()
        for index in range(_THREADS):
            threading.Thread(target=self._compile, name=f"grammar-{index}", daemon=True).start()

    def begin(self, request_id: str, grammar: str, tell: Tell, now: float, tenant: str = "") -> None:
        self._deadlines[request_id] = now + self._timeout_s
        self._work.put(_Asked(tenant, request_id, grammar, tell))

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
        while (asked := self._work.take()) is not None:
            try:
                if asked.request_id in self._deadlines:  # otherwise it has ended or is overdue
                    asked.tell(self._attempt(asked.grammar))
            finally:
                self._work.done(asked.tenant)

    def _attempt(self, grammar: str) -> TandemError | None:
        try:
            self._grammars.prepare(grammar)
        except TandemError as error:
            return error
        except BaseException as error:  # the library's panics are no Exceptions, and must not end the thread
            return InternalError(f"compiling the answer's grammar failed: {type(error).__name__}: {error}")
        return None
