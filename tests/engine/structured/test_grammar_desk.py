"""Grammars are compiled in the background: which requests wait, for how long, and how the wait ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from tandem.base.errors import DeadlineExceeded, InternalError, InvalidRequest
from tandem.engine.structured.desk import GrammarDesk, GrammarReady
from tandem.engine.structured.grammars import TokenizerGrammars
from tests.engine.structured.grammar_walks import END, backend, grammars, vocabulary

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


class Desk(GrammarDesk):
    def __init__(self, of: TokenizerGrammars) -> None:
        self.told: queue.Queue[GrammarReady] = queue.Queue()
        super().__init__(of, 5.0, self.told.put)


@pytest.fixture
def slow() -> Iterator[tuple[Slow, Desk]]:
    of = Slow()
    desk = Desk(of)
    yield of, desk
    of.go.set()
    desk.close()


def test_a_compiled_grammar_needs_no_waiting(slow: tuple[Slow, Desk]) -> None:
    of, desk = slow
    assert desk.must_wait('start: "a"')
    desk.begin("r", 'start: "a"', now=0.0)
    of.go.set()
    assert desk.told.get(timeout=PATIENCE_S) == GrammarReady("r", None)
    assert desk.forget("r")
    assert not desk.must_wait('start: "a"')


def test_what_takes_too_long_is_overdue_once_and_its_late_result_is_nobodys(slow: tuple[Slow, Desk]) -> None:
    of, desk = slow
    desk.begin("first", 'start: "a"', now=0.0)
    desk.begin("second", 'start: "b"', now=3.0)
    for _ in range(2):
        of.begun.get(timeout=PATIENCE_S)
    assert desk.seconds_until_due(1.0) == 4.0
    assert desk.overdue(4.9) == []
    ((request_id, error),) = desk.overdue(5.0)
    assert request_id == "first"
    assert isinstance(error, DeadlineExceeded)
    assert desk.overdue(5.0) == []
    of.go.set()
    late = {desk.told.get(timeout=PATIENCE_S).request_id for _ in range(2)}
    assert late == {"first", "second"}
    assert not desk.forget("first")
    assert desk.forget("second")
    assert desk.seconds_until_due(9.0) is None


def test_a_tenant_with_many_grammars_does_not_delay_another_one(slow: tuple[Slow, Desk]) -> None:
    of, desk = slow
    for number in range(9):
        desk.begin(f"greedy {number}", f'start: "{number}"', now=0.0, tenant="greedy")
    for _ in range(2):
        of.begun.get(timeout=PATIENCE_S)
    desk.begin("other", 'start: "o"', now=0.0, tenant="other")
    of.go.set()
    assert 'start: "o"' in [of.begun.get(timeout=PATIENCE_S) for _ in range(2)]


def test_what_nobody_waits_for_any_more_is_not_compiled(slow: tuple[Slow, Desk]) -> None:
    of, desk = slow
    for number in range(2):
        desk.begin(f"busy {number}", f'start: "{number}"', now=0.0)
        of.begun.get(timeout=PATIENCE_S)
    desk.begin("cancelled", 'start: "c"', now=1.0)
    desk.begin("too late", 'start: "d"', now=1.0)
    desk.begin("in time", 'start: "e"', now=3.0)
    assert desk.forget("cancelled")
    assert "too late" in [request_id for request_id, _ in desk.overdue(6.0)]
    of.go.set()
    assert of.begun.get(timeout=PATIENCE_S) == 'start: "e"'
    assert {desk.told.get(timeout=PATIENCE_S).request_id for _ in range(3)} == {"busy 0", "busy 1", "in time"}


def test_a_text_that_is_no_grammar_is_an_error_that_says_so() -> None:
    desk = Desk(grammars())
    desk.begin("r", "start: unknown", now=0.0)
    error = desk.told.get(timeout=PATIENCE_S).error
    assert isinstance(error, InvalidRequest)
    assert "unknown" in str(error)
    desk.close()


def test_a_panic_is_an_error_and_does_not_end_the_thread() -> None:
    desk = Desk(Panics())
    for request_id in "abc":
        desk.begin(request_id, 'start: "a"', now=0.0)
    for _ in range(3):
        assert isinstance(desk.told.get(timeout=PATIENCE_S).error, InternalError)
    desk.close()
