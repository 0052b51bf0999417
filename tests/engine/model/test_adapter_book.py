"""Adapters come and go while requests use them: what is served, used or lately replaced is there, and the rest is forgotten."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.model.adapter_book import KEEP_REPLACED_S, MOST_REPLACED, AdapterBook
from tandem.engine.model.adapters import Adapter, LayerUpdate
from tandem.wire.adapters import identity_of, name_of
from tests.adapter_books import PlainBook

SIZE = 3
NAMES, CONTENTS = "abc", (1, 2, 3)


def adapter(name: str, content: int) -> Adapter:
    """Each adapter adds another value to a row of ones, which shows which one was applied."""
    number = float(10 * (NAMES.index(name) + 1) + content)
    down = torch.zeros(1, SIZE)
    down[0, 0] = 1
    return Adapter(name, f"{content}" * 64, {"layer": LayerUpdate(down, torch.full((SIZE, 1), number))})


class ComingAndGoing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = self.new_book()
        self.wanted: dict[str, Adapter] = {}
        self.replaced: dict[str, float] = {}  # by identity: when it was last asked for
        self.running: list[Adapter] = []

    def new_book(self) -> AdapterBook[Adapter]:
        return PlainBook()

    @rule(read=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(CONTENTS)), kept=st.sets(st.sampled_from(NAMES)))
    def serve(self, read: dict[str, int], kept: set[str]) -> None:
        new = {name: adapter(name, content) for name, content in read.items()}
        self.book.serve(new.values(), kept, self.now)
        before = self.wanted
        self.wanted = {name: one for name, one in before.items() if name in kept} | new
        for name, one in before.items():
            if name in new:
                self.replaced[one.identity] = self.now
        served = {one.identity for one in self.wanted.values()}
        self.replaced = {
            each: at for each, at in self.replaced.items() if name_of(each) in self.wanted and each not in served
        }

    @rule(seconds=st.sampled_from([1.0, KEEP_REPLACED_S / 2, KEEP_REPLACED_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def begin_with_a_replaced_one(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.replaced)))
        if self.book.has(identity):
            name, digest = identity.split("@")
            self.running.append(adapter(name, int(digest[0])))
            self.book.asked_for(identity, self.now)
            self.replaced[identity] = self.now

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.running.append(self.wanted[data.draw(st.sampled_from(sorted(self.wanted)))])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    @rule()
    def forget(self) -> None:
        used = {one.identity for one in self.running}
        self.book.forget_others(used, self.now)
        self.replaced = {
            each: at for each, at in self.replaced.items() if each in used or self.now < at + KEEP_REPLACED_S
        }
        served = {one.identity for one in self.wanted.values()}
        assert self.book.has_others == bool((used | self.replaced.keys()) - served)
        listed = {identity_of(name, digest) for name, digests in self.book.replaced.items() for digest in digests}
        assert listed == self.replaced.keys()

    @invariant()
    def what_is_served_or_used_is_here(self) -> None:
        assert self.book.served == {name: one.digest for name, one in self.wanted.items()}
        for one in (*self.wanted.values(), *self.running):
            assert self.book.has(one.identity)
        for identity, at in self.replaced.items():
            assert self.book.has(identity) or self.now >= at + KEEP_REPLACED_S


TestComingAndGoing = ComingAndGoing.TestCase


def version(number: int, name: str = "a") -> Adapter:
    return Adapter(
        name, f"{number:032d}" + "0" * 32, {"layer": LayerUpdate(torch.zeros(1, SIZE), torch.zeros(SIZE, 1))}
    )


def test_an_adapter_is_forgotten_once_when_nothing_uses_it() -> None:
    book = PlainBook()
    book.serve([version(0), version(1, "b")])
    book.serve([], now=1.0)
    book.forget_others({version(0).identity}, 1.0)
    assert book.forgets == [version(1, "b").identity]
    assert book.has(version(0).identity)
    book.forget_others(set(), 2.0)
    book.forget_others(set(), 3.0)
    assert book.forgets == [version(1, "b").identity, version(0).identity]


def test_a_replaced_adapter_is_looked_at_also_on_a_node_that_does_nothing() -> None:
    book = PlainBook()
    book.serve([version(0)])
    assert book.seconds_until_look(0.0) is None
    book.serve([version(1)])
    assert book.seconds_until_look(0.0) == 0.0
    book.forget_others(set(), 5.0)
    assert book.seconds_until_look(5.0) == 1.0
    book.forget_others(set(), KEEP_REPLACED_S)
    assert book.seconds_until_look(KEEP_REPLACED_S) is None


def test_of_one_name_the_oldest_replaced_ones_go_first_but_never_one_in_use() -> None:
    book = PlainBook()
    count = MOST_REPLACED + 4
    for number in range(count):
        book.serve([version(number)], ["b"] if number else [], float(number))
        book.serve([version(number, "b")] if not number else [], ["a", "b"], float(number))
    used = {version(0).identity}
    book.forget_others(used, float(count))
    kept = [number for number in range(count) if book.has(version(number).identity)]
    assert kept == [0, *range(count - MOST_REPLACED, count)]
    assert book.replaced == {"a": tuple(version(number).digest for number in reversed(kept) if number != count - 1)}
    book.forget_others(set(), float(count))
    assert book.has(version(0).identity), "it is one of those that are kept"


def test_while_the_machine_has_little_memory_the_oldest_goes_and_never_one_in_use() -> None:
    one = version(0).num_bytes
    book = PlainBook(lambda: 2 * one)
    for number in range(5):
        book.serve([version(number)], now=float(number))
    used = {version(0).identity}
    for now in (10.0, 10.1, 20.0, 30.0):  # not twice in a moment: memory comes back late
        book.forget_others(used, now)
        if now == 10.1:
            assert [number for number in range(5) if book.has(version(number).identity)] == [0, 2, 3, 4]
    assert [number for number in range(5) if book.has(version(number).identity)] == [0, 3, 4]
    assert book.replaced == {"a": (version(3).digest, version(0).digest)}
