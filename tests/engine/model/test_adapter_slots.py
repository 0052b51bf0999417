"""Adapters come and go while requests use them: each row of a step gets its own, and unused ones are dropped."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.model.lora.folder import Adapter, LayerUpdate
from tandem.engine.model.lora.layers import AdaptedLayers
from tandem.engine.model.lora.rows import AdaptedLayer, StepRows
from tandem.engine.model.lora.slots import AdapterSlots
from tandem.wire.errors import ConfigurationError

SLOTS, RANK, SIZE = 2, 2, 3
NAMES, CONTENTS = "abc", (1, 2)


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
        self.slots = AdapterSlots(self.layers, torch.float32, torch.device("cpu"))
        self.wanted: dict[str, Adapter] = {}
        self.running: list[Adapter] = []

    @rule(
        read=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(CONTENTS)),
        kept=st.sets(st.sampled_from(NAMES)),
    )
    def serve(self, read: dict[str, int], kept: set[str]) -> None:
        new = {name: adapter(name, content) for name, content in read.items()}
        self.slots.serve(new.values(), kept)
        self.wanted = {name: one for name, one in self.wanted.items() if name in kept} | new

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
        self.slots.forget_others(used)
        assert self.slots.has_others == bool(used - {one.identity for one in self.wanted.values()})

    @invariant()
    def what_is_served_or_used_is_here(self) -> None:
        assert self.slots.served == {name: one.digest for name, one in self.wanted.items()}
        for one in (*self.wanted.values(), *self.running):
            assert self.slots.has(one.identity)


TestComingAndGoing = ComingAndGoing.TestCase


def test_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    machine = ComingAndGoing()
    machine.serve({"a": 1}, set())
    with pytest.raises(ConfigurationError, match="is no adapter"):
        machine.slots.read("b", tmp_path)
    machine.what_is_served_or_used_is_here()
