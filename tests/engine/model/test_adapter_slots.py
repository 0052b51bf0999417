"""Adapters that come and go get slots of the layers: each row of a step has its own."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import precondition, rule

from tandem.base.errors import ConfigurationError
from tandem.engine.model.adapters import Adapter
from tandem.engine.model.lora.layers import AdaptedLayers
from tandem.engine.model.lora.rows import AdaptedLayer, StepRows
from tandem.engine.model.lora.slots import AdapterSlots
from tests.adapter_books import PLENTY
from tests.engine.model.test_adapter_book import SIZE, ComingAndGoing

SLOTS, RANK = 2, 2


def number_of(one: Adapter) -> float:
    return float(one.updates["layer"].up[0, 0])


class ComingAndGoingInSlots(ComingAndGoing):
    def new_book(self) -> AdapterSlots:
        rows = StepRows(SLOTS, RANK)
        self.layer = AdaptedLayer((SIZE, SIZE), rows)
        self.layers = AdaptedLayers({"layer": self.layer}, {}, rows)
        self.slots = AdapterSlots(self.layers, torch.float32, torch.device("cpu"), lambda: PLENTY)
        return self.slots

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


TestComingAndGoingInSlots = ComingAndGoingInSlots.TestCase


def test_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    machine = ComingAndGoingInSlots()
    machine.serve({"a": 1}, set())
    with pytest.raises(ConfigurationError, match="is no adapter"):
        machine.slots.read("b", tmp_path)
    machine.what_is_served_or_used_is_here()
