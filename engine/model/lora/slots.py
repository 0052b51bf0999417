"""Which adapters a node has, and which of them are in the slots of the model's layers.

Host memory has all adapters that are served, those that a request still uses, and replaced ones for a while: routers planned requests with
them before they heard of the new ones, and streams of a node that dies go on with them. An unloaded adapter is forgotten when nothing uses it.

A step may have as many different adapters as there are slots (`scheduler.max_loras`); the least recently used one makes room. The device
executes copies into slots in order with the steps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.adapters import Adapter
from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.lora.folder import read_adapter
from tandem.engine.model.lora.layers import AdaptedLayers
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Batch
from tandem.engine.model.staging import to_device
from tandem.machine.resources import free_memory
from tandem.wire.adapters import identity_of

# How long a replaced adapter is kept after its last request came: half an hour, which a request lives (the default of
# `router.timeouts.total`), after the half hour that the slowest node may take to load the new one.
KEEP_REPLACED_S = 3600.0
MOST_REPLACED = 8  # of one name
LOOK_AT_MEMORY_S = 1.0  # it takes a moment until memory that was given back counts as free


class AdapterSlots:
    """See engine.model.adapters.Adapters."""

    def __init__(
        self,
        layers: AdaptedLayers,
        dtype: torch.dtype,
        device: torch.device,
        free_memory: Callable[[], int] = free_memory,
    ) -> None:
        self._layers = layers
        self._free_memory = free_memory
        self._look_at = 0.0  # no look at the memory before this
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._adapters: dict[str, Adapter] = {}  # by identity
        self._slots: dict[str, int] = {}  # by identity, the least recently used first
        self.served: dict[str, str] = {}  # digests by name; the dict is replaced, never changed
        # The replaced adapters that are kept: digests by name, the newest first. Replaced like `served`.
        self.replaced: dict[str, tuple[str, ...]] = {}
        # The same by identity, in the order in which they were replaced, each with when it was last asked for.
        self._replaced: dict[str, float] = {}

    def read(self, name: str, folder: Path) -> Adapter:
        layers = self._layers
        return read_adapter(name, folder, layers.shapes, layers.unfit, max_rank=layers.rank, dtype=self._like.dtype)

    def serve(self, read: Iterable[Adapter], kept: Collection[str] = (), now: float = 0.0) -> None:
        served = {name: digest for name, digest in self.served.items() if name in kept}
        for adapter in read:
            self._adapters[adapter.identity] = adapter
            served[adapter.name] = adapter.digest
        for name, digest in self.served.items():
            if served.get(name, digest) != digest:
                self._replaced[identity_of(name, digest)] = now
        for identity in list(self._replaced):
            adapter = self._adapters[identity]
            if served.get(adapter.name) in (None, adapter.digest):  # unloaded, or served again
                del self._replaced[identity]
        self._list_replaced()  # first, so that a thread that reads both finds each adapter in one of them
        self.served = served

    def _list_replaced(self) -> None:
        replaced: dict[str, tuple[str, ...]] = {}
        for adapter in map(self._adapters.__getitem__, reversed(self._replaced)):
            replaced[adapter.name] = (*replaced.get(adapter.name, ()), adapter.digest)
        self.replaced = replaced

    def has(self, identity: str) -> bool:
        return identity in self._adapters

    def asked_for(self, identity: str, now: float) -> None:
        if identity in self._replaced:
            self._replaced[identity] = now

    @property
    def has_others(self) -> bool:
        return len(self._adapters) > len(self.served)

    def forget_others(self, used: Collection[str], now: float) -> None:
        if leaving := self._leaving([identity for identity in self._replaced if identity not in used], now):
            for identity in leaving:
                del self._replaced[identity]
            self._list_replaced()
        served = {identity_of(name, digest) for name, digest in self.served.items()}
        for identity in self._adapters.keys() - served - self._replaced.keys() - set(used):
            del self._adapters[identity]
            self._slots.pop(identity, None)

    def _leaving(self, unused: list[str], now: float) -> set[str]:
        """The replaced adapters that are kept no longer. `unused`: those that no request uses, in the order in which they were replaced."""
        leaving = {each for each in unused if now >= self._replaced[each] + KEEP_REPLACED_S}
        kept = Counter(self._adapters[each].name for each in self._replaced.keys() - leaving)
        for identity in unused:
            name = self._adapters[identity].name
            if kept[name] > MOST_REPLACED and identity not in leaving:
                leaving.add(identity)
                kept[name] -= 1
        if now >= self._look_at:
            self._look_at = now + LOOK_AT_MEMORY_S
            # Together they may take as much memory as they leave free.
            if unused and self._free_memory() < sum(self._adapters[each].num_bytes for each in self._replaced):
                leaving.add(unused[0])
        return leaving

    def seconds_until_look(self, now: float) -> float | None:
        return max(0.0, self._look_at - now) if self._replaced else None

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
