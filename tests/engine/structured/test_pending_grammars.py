"""Grammars are compiled in the background: which requests wait, for how long, and how the wait ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from tandem.base.errors import DeadlineExceeded, InternalError, TandemError
from tandem.engine.structured.grammars import TokenizerGrammars
from tandem.engine.structured.pending import PendingGrammars
from tests.engine.structured.grammar_walks import END, backend, vocabulary

PATIENCE_S = 10.0


class Slow(TokenizerGrammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(backend().to_str, vocabulary(), frozenset({END}))
        self.go = threading.Event()
        self.begun: queue.Queue[str] = queue.Queue()

    def prepare(self, grammar: str) -> None:
        self.begun.put(grammar)
        assert self.go.wait(PATIENCE_S)
        super().prepare(grammar)


class Panics(TokenizerGrammars):
    def __init__(self) -> None:
        super().__init__(backend().to_str, vocabulary(), frozenset({END}))

    def prepare(self, grammar: str) -> None:
        raise KeyboardInterrupt("as a library's panic: no Exception")


class Pending(PendingGrammars):
    def __init__(self, of: TokenizerGrammars) -> None:
        self.told: queue.Queue[tuple[str, TandemError | None]] = queue.Queue()
        super().__init__(of, 5.0)

    def ask(self, request_id: str, grammar: str, now: float, tenant: str = "") -> None:
        self.begin(request_id, grammar, lambda error: self.told.put((request_id, error)), now, tenant)


@pytest.fixture
def slow() -> Iterator[tuple[Slow, Pending]]:
    of = Slow()
    pending = Pending(of)
    yield of, pending
    of.go.set()
    pending.close()


def test_what_takes_too_long_is_overdue_once_and_its_late_result_is_nobodys(slow: tuple[Slow, Pending]) -> None:
    of, pending = slow
    pending.ask("first", 'start: "a"', now=0.0)
    pending.ask("second", 'start: "b"', now=3.0)
    for _ in range(2):
        of.begun.get(timeout=PATIENCE_S)
    assert pending.seconds_until_due(1.0) == 4.0
    assert pending.overdue(4.9) == []
    ((request_id, error),) = pending.overdue(5.0)
    assert request_id == "first"
    assert isinstance(error, DeadlineExceeded)
    assert pending.overdue(5.0) == []
    of.go.set()
    late = {pending.told.get(timeout=PATIENCE_S)[0] for _ in range(2)}
    assert late == {"first", "second"}
    assert not pending.forget("first")
    assert pending.forget("second")
    assert pending.seconds_until_due(9.0) is None


def test_a_tenant_with_many_grammars_does_not_delay_another_one(slow: tuple[Slow, Pending]) -> None:
    of, pending = slow
    for number in range(9):
        pending.ask(f"greedy {number}", f'start: "{number}"', now=0.0, tenant="greedy")
    for _ in range(2):
        of.begun.get(timeout=PATIENCE_S)
    pending.ask("other", 'start: "o"', now=0.0, tenant="other")
    of.go.set()
    assert 'start: "o"' in [of.begun.get(timeout=PATIENCE_S) for _ in range(2)]


def test_grammars_of_one_tenant_that_never_end_leave_threads_for_others(slow: tuple[Slow, Pending]) -> None:
    of, pending = slow
    for number in range(9):
        pending.ask(f"greedy {number}", f'start: "{number}"', now=0.0, tenant="greedy")
    for number in range(2):
        assert of.begun.get(timeout=PATIENCE_S) == f'start: "{number}"'
    pending.ask("other", 'start: "o"', now=0.0, tenant="other")
    assert of.begun.get(timeout=PATIENCE_S) == 'start: "o"'


def test_what_nobody_waits_for_any_more_is_not_compiled(slow: tuple[Slow, Pending]) -> None:
    of, pending = slow
    for number in range(2):
        pending.ask(f"busy {number}", f'start: "{number}"', now=0.0)
        of.begun.get(timeout=PATIENCE_S)
    pending.ask("cancelled", 'start: "c"', now=1.0)
    pending.ask("too late", 'start: "d"', now=1.0)
    pending.ask("in time", 'start: "e"', now=3.0)
    assert pending.forget("cancelled")
    assert "too late" in [request_id for request_id, _ in pending.overdue(6.0)]
    of.go.set()
    assert of.begun.get(timeout=PATIENCE_S) == 'start: "e"'
    assert {pending.told.get(timeout=PATIENCE_S)[0] for _ in range(3)} == {"busy 0", "busy 1", "in time"}


def test_a_panic_is_an_error_and_does_not_end_the_thread() -> None:
    pending = Pending(Panics())
    for request_id in "abc":
        pending.ask(request_id, 'start: "a"', now=0.0)
    for _ in range(3):
        assert isinstance(pending.told.get(timeout=PATIENCE_S)[1], InternalError)
    pending.close()
