"""Which adapters of a node's book are in the slots of the model's layers.

A step may have as many different adapters as there are slots (`scheduler.max_loras`); the least recently used one makes room. The device
executes copies into slots in order with the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.adapter_book import AdapterBook
from tandem.engine.model.adapters import Adapter
from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.lora.folder import read_adapter
from tandem.engine.model.lora.layers import AdaptedLayers
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Batch
from tandem.engine.model.staging import to_device
from tandem.machine.resources import free_memory


class AdapterSlots(AdapterBook[Adapter]):
    def __init__(
        self,
        layers: AdaptedLayers,
        dtype: torch.dtype,
        device: torch.device,
        free_memory: Callable[[], int] = free_memory,
    ) -> None:
        super().__init__(free_memory)
        self._layers = layers
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._slots: dict[str, int] = {}  # by identity, the least recently used first

    def read(self, name: str, folder: Path) -> Adapter:
        layers = self._layers
        return read_adapter(name, folder, layers.shapes, layers.unfit, max_rank=layers.rank, dtype=self._like.dtype)

    def forgotten(self, adapter: Adapter) -> None:
        self._slots.pop(adapter.identity, None)

    def place(self, wanted: Collection[str]) -> dict[str, int]:
        """Copies the adapters that a step needs into slots, unless they are there; returns the slot of each, by identity."""
        for identity in wanted:
            slot = self._slots.pop(identity, None)
            self._slots[identity] = slot if slot is not None else self._fill(identity, wanted)
        return {identity: self._slots[identity] for identity in wanted}

    def _fill(self, identity: str, wanted: Collection[str]) -> int:
        free = set(range(self._layers.slots)) - set(self._slots.values())
        if free:
            slot = min(free)
        else:
            oldest = next((each for each in self._slots if each not in wanted), None)
            if oldest is None:
                raise InternalError(f"a step has {len(wanted)} adapters, and there are {self._layers.slots} slots")
            slot = self._slots.pop(oldest)
        adapter = self._adapters[identity]
        for name, layer in self._layers.layers.items():
            layer.put(slot, adapter.updates.get(name), self._like)
        return slot


class AdaptedRequests(RunnerPart):
    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._wanted: dict[int, str] = {}  # the identity of each request's adapter, by row

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        if asked.facts.lora is not None:
            self._wanted[row] = asked.facts.lora

    def clear(self, row: int) -> None:
        self._wanted.pop(row, None)

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        if not self._wanted:
            return batch
        rows = scheduled.rows.tolist()
        wanted = {self._wanted[row] for row in rows if row in self._wanted}
        if not wanted:
            return batch
        slots = self._slots.place(wanted)
        of_request = np.array([slots[self._wanted[row]] if row in self._wanted else -1 for row in rows], np.int64)
        of_token = np.repeat(of_request, np.diff(scheduled.query_start))
        return dataclasses.replace(
            batch, adapter_slots=to_device(of_token, batch.token_ids.device), adapter_slots_used=max(slots.values()) + 1
        )
