"""Which adapters a node has, and which of them are in the slots of the model's layers.

Host memory has all adapters that are served, and those that a request still uses. A step may have as many different adapters as there are
slots (`scheduler.max_loras`); the least recently used one makes room. The device executes copies into slots in order with the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from tandem.engine.model.lora.folder import Adapter, read_adapter
from tandem.engine.model.lora.layers import AdaptedLayers
from tandem.wire.adapters import identity_of
from tandem.wire.errors import InternalError


class AdapterSlots:
    """Any thread may use `read` and `served`; only the step thread uses everything else."""

    def __init__(self, layers: AdaptedLayers, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._adapters: dict[str, Adapter] = {}  # by identity
        self._slots: dict[str, int] = {}  # by identity, the least recently used first
        self.served: dict[str, str] = {}  # digests by name; the dict is replaced, never changed

    def read(self, name: str, folder: Path) -> Adapter:
        """Reads an adapter and checks that it fits the model. Raises a ConfigurationError."""
        layers = self._layers
        return read_adapter(
            name, folder, layers.shapes, layers.unfit, max_rank=layers.rank, dtype=self._like.dtype
        )

    def serve(self, read: Iterable[Adapter], kept: Collection[str] = ()) -> None:
        """Serves the adapters in `read` from now on, and those already served whose names are in `kept`; no others."""
        served = {name: digest for name, digest in self.served.items() if name in kept}
        for adapter in read:
            self._adapters[adapter.identity] = adapter
            served[adapter.name] = adapter.digest
        self.served = served

    def has(self, identity: str) -> bool:
        return identity in self._adapters

    @property
    def has_others(self) -> bool:
        """Whether the node still has adapters that are no longer served."""
        return len(self._adapters) > len(self.served)

    def forget_others(self, used: Collection[str]) -> None:
        """Forgets the adapters that are neither served nor in `used`, which has identities."""
        served = {identity_of(name, digest) for name, digest in self.served.items()}
        for identity in self._adapters.keys() - served - set(used):
            del self._adapters[identity]
            self._slots.pop(identity, None)

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
                raise InternalError(
                    f"a step has {len(wanted)} adapters, and there are {self._layers.slots} slots"
                )
            slot = self._slots.pop(oldest)
        adapter = self._adapters[identity]
        for name, layer in self._layers.layers.items():
            layer.put(slot, adapter.updates.get(name), self._like)
        return slot
