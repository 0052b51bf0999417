"""How long a node asks an object store what it has, and what it makes of a store that is far away."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.kvtransfer.objects import inquiries
from tandem.kvtransfer.objects.client import StoreError
from tandem.kvtransfer.objects.inquiries import ANSWER_S, Inquiries, StoredPrefix

KEYS = [number.to_bytes(32, "big") for number in range(1000)]
THERE = 600
AWAY_S = 0.12  # from a question to its answer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FarStore:
    """Has the first keys, and answers each question after the same time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def has(self, era: str, key: bytes, until: float) -> bool:
        self._clock.now += AWAY_S
        if self._clock.now >= until:
            raise StoreError("it did not answer in time")
        return key in KEYS[:THERE]


def test_a_store_that_answers_each_question_is_not_left_out_because_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, woken, failures = Clock(), threading.Event(), list[StoreError]()
    monkeypatch.setattr(inquiries, "time", SimpleNamespace(monotonic=clock))
    store: Any = FarStore(clock)
    eras: Any = SimpleNamespace(name="", open_now="e", distrusted="")
    asking = Inquiries(store, eras, woken.set, failures.append)
    try:
        until = asking.ask(KEYS)
        assert woken.wait(20)
        (found,) = asking.take()
        assert not failures
        assert THERE // 2 < found.count <= THERE, "what it knows by then"
        assert clock.now < until + AWAY_S, "it asks no longer than a request waits"
    finally:
        asking.close()


def test_a_question_that_waited_in_line_says_nothing_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, woken, failures = Clock(), threading.Event(), list[StoreError]()
    monkeypatch.setattr(inquiries, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(inquiries, "THREADS", 1)
    begun, go_on = threading.Event(), threading.Event()

    class BusyStore(FarStore):
        def has(self, era: str, key: bytes, until: float) -> bool:
            begun.set()
            assert go_on.wait(20)
            return super().has(era, key, until)

    store: Any = BusyStore(clock)
    eras: Any = SimpleNamespace(name="", open_now="e", distrusted="")
    asking = Inquiries(store, eras, woken.set, failures.append)
    try:
        asking.ask(KEYS[:1])
        assert begun.wait(20)
        asking.ask(KEYS[1:3])
        clock.now += ANSWER_S - 1.5 * AWAY_S
        go_on.set()
        found: list[StoredPrefix] = []
        while len(found) < 2:
            assert woken.wait(20)
            woken.clear()
            found += asking.take()
        assert not failures
    finally:
        asking.close()
