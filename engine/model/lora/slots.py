"""Which adapters a node has, and which of them lie in the slots of the model's layers.

All that are served are kept in host memory, and those that a request still uses. A step may have as many different ones as there are slots (`scheduler.max_loras`); the one
that was used least recently makes room. Copies into slots are ordered with the steps on the device.
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
    """`read` and `served` may be used from any thread, everything else from the step thread only."""

    def __init__(self, layers: AdaptedLayers, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._adapters: dict[str, Adapter] = {}  # by identity
        self._slots: dict[str, int] = {}  # by identity; the least recently used first
        self.served: dict[str, str] = {}  # digests by name; replaced, never changed

    def read(self, name: str, folder: Path) -> Adapter:
        """Raises ConfigurationError."""
        layers = self._layers
        return read_adapter(
            name, folder, layers.shapes, layers.unfit, max_rank=layers.rank, dtype=self._like.dtype
        )

    def serve(self, read: Iterable[Adapter], kept: Collection[str] = ()) -> None:
        """From now on: those that were `read`, and of those that are served the ones with the names `kept`."""
        served = {name: digest for name, digest in self.served.items() if name in kept}
        for adapter in read:
            self._adapters[adapter.identity] = adapter
            served[adapter.name] = adapter.digest
        self.served = served

    def has(self, identity: str) -> bool:
        return identity in self._adapters

    @property
    def has_others(self) -> bool:
        """Some are here that are no longer served."""
        return len(self._adapters) > len(self.served)

    def forget_others(self, used: Collection[str]) -> None:
        """Those that are neither served nor `used`, by identity."""
        served = {identity_of(name, digest) for name, digest in self.served.items()}
        for identity in self._adapters.keys() - served - set(used):
            del self._adapters[identity]
            self._slots.pop(identity, None)

    def place(self, wanted: Collection[str]) -> dict[str, int]:
        """The slots of a step's adapters, all of them on the device."""
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
