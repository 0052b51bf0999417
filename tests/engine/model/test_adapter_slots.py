"""Adapters come and go while requests use them: each row of a step gets its own, and unused ones are dropped."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.base.errors import ConfigurationError
from tandem.engine.model.adapters import Adapter, LayerUpdate
from tandem.engine.model.lora.layers import AdaptedLayers
from tandem.engine.model.lora.rows import AdaptedLayer, StepRows
from tandem.engine.model.lora.slots import KEEP_REPLACED_S, MOST_REPLACED, AdapterSlots
from tandem.wire.adapters import identity_of, name_of

SLOTS, RANK, SIZE = 2, 2, 3
NAMES, CONTENTS = "abc", (1, 2, 3)
PLENTY = 1 << 40


def adapter(name: str, content: int) -> Adapter:
    """Each adapter adds another value to a row of ones, which shows which one was applied."""
    number = float(10 * (NAMES.index(name) + 1) + content)
    down = torch.zeros(1, SIZE)
    down[0, 0] = 1
    return Adapter(name, f"{content}" * 64, {"layer": LayerUpdate(down, torch.full((SIZE, 1), number))})


def number_of(one: Adapter) -> float:
    return float(one.updates["layer"].up[0, 0])


class ComingAndGoing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        rows = StepRows(SLOTS, RANK)
        self.layer = AdaptedLayer((SIZE, SIZE), rows)
        self.layers = AdaptedLayers({"layer": self.layer}, {}, rows)
        self.now = 0.0
        self.slots = AdapterSlots(self.layers, torch.float32, torch.device("cpu"), lambda: PLENTY)
        self.wanted: dict[str, Adapter] = {}
        self.replaced: dict[str, float] = {}  # by identity: when it was last asked for
        self.running: list[Adapter] = []

    @rule(read=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(CONTENTS)), kept=st.sets(st.sampled_from(NAMES)))
    def serve(self, read: dict[str, int], kept: set[str]) -> None:
        new = {name: adapter(name, content) for name, content in read.items()}
        self.slots.serve(new.values(), kept, self.now)
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
        if self.slots.has(identity):
            name, digest = identity.split("@")
            self.running.append(adapter(name, int(digest[0])))
            self.slots.asked_for(identity, self.now)
            self.replaced[identity] = self.now

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.running.append(self.wanted[data.draw(st.sampled_from(sorted(self.wanted)))])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.running), min_size=1, max_size=SLOTS))
        slots = self.slots.place({one.identity for one in rows})
        assert len(set(slots.values())) == len(slots)
        of_rows = torch.tensor([slots[one.identity] for one in rows])
        with self.layers.step(of_rows, max(slots.values()) + 1):
            added = self.layer.add_to(torch.zeros(len(rows), SIZE), torch.ones(len(rows), SIZE))
        assert added[:, 0].tolist() == [number_of(one) for one in rows]

    @rule()
    def forget(self) -> None:
        used = {one.identity for one in self.running}
        self.slots.forget_others(used, self.now)
        self.replaced = {
            each: at for each, at in self.replaced.items() if each in used or self.now < at + KEEP_REPLACED_S
        }
        served = {one.identity for one in self.wanted.values()}
        assert self.slots.has_others == bool((used | self.replaced.keys()) - served)
        listed = {identity_of(name, digest) for name, digests in self.slots.replaced.items() for digest in digests}
        assert listed == self.replaced.keys()

    @invariant()
    def what_is_served_or_used_is_here(self) -> None:
        assert self.slots.served == {name: one.digest for name, one in self.wanted.items()}
        for one in (*self.wanted.values(), *self.running):
            assert self.slots.has(one.identity)
        for identity, at in self.replaced.items():
            assert self.slots.has(identity) or self.now >= at + KEEP_REPLACED_S


TestComingAndGoing = ComingAndGoing.TestCase


def test_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    machine = ComingAndGoing()
    machine.serve({"a": 1}, set())
    with pytest.raises(ConfigurationError, match="is no adapter"):
        machine.slots.read("b", tmp_path)
    machine.what_is_served_or_used_is_here()


def version(number: int, name: str = "a") -> Adapter:
    return Adapter(
        name, f"{number:032d}" + "0" * 32, {"layer": LayerUpdate(torch.zeros(1, SIZE), torch.zeros(SIZE, 1))}
    )


def slots_with(free_memory: int) -> AdapterSlots:
    return AdapterSlots(AdaptedLayers({}, {}, StepRows(1, 1)), torch.float32, torch.device("cpu"), lambda: free_memory)


def test_of_one_name_the_oldest_replaced_ones_go_first_but_never_one_in_use() -> None:
    slots = slots_with(PLENTY)
    count = MOST_REPLACED + 4
    for number in range(count):
        slots.serve([version(number)], ["b"] if number else [], float(number))
        slots.serve([version(number, "b")] if not number else [], ["a", "b"], float(number))
    used = {version(0).identity}
    slots.forget_others(used, float(count))
    kept = [number for number in range(count) if slots.has(version(number).identity)]
    assert kept == [0, *range(count - MOST_REPLACED, count)]
    assert slots.replaced == {"a": tuple(version(number).digest for number in reversed(kept) if number != count - 1)}
    slots.forget_others(set(), float(count))
    assert slots.has(version(0).identity), "it is one of those that are kept"


def test_while_the_machine_has_little_memory_the_oldest_goes_and_never_one_in_use() -> None:
    one = version(0).num_bytes
    slots = slots_with(2 * one)
    for number in range(5):
        slots.serve([version(number)], now=float(number))
    used = {version(0).identity}
    for now in (10.0, 10.1, 20.0, 30.0):  # not twice in a moment: memory comes back late
        slots.forget_others(used, now)
        if now == 10.1:
            assert [number for number in range(5) if slots.has(version(number).identity)] == [0, 2, 3, 4]
    assert [number for number in range(5) if slots.has(version(number).identity)] == [0, 3, 4]
    assert slots.replaced == {"a": (version(3).digest, version(0).digest)}
