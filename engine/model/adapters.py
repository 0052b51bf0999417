"""What the rest of the house knows of LoRA adapters: which a node serves, and what they add to linear layers. `lora/` does both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from tandem.wire.adapters import identity_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class LayerUpdate(msgspec.Struct, frozen=True):
    """An adapter's update of one linear layer: it adds x times `down`ᵀ times `up`ᵀ."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank], multiplied by the adapter's scale

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class Adapter(msgspec.Struct, frozen=True):
    name: str
    digest: str  # of the folder's two files
    updates: dict[str, LayerUpdate]  # by the layer's name

    @property
    def identity(self) -> str:
        return identity_of(self.name, self.digest)

    @property
    def num_bytes(self) -> int:
        return sum(update.down.nbytes + update.up.nbytes for update in self.updates.values())


class Adapters(Protocol):
    """The adapters that requests may name. Any thread may use `read`, `served` and `replaced`; only the step thread uses everything
    else."""

    @property
    def served(self) -> dict[str, str]:
        """Digests by name."""

    @property
    def replaced(self) -> Mapping[str, tuple[str, ...]]:
        """The replaced adapters that are kept: digests by name, the newest first."""

    @property
    def has_others(self) -> bool:
        """Whether the node still has adapters that are no longer served."""

    def read(self, name: str, folder: Path) -> Adapter:
        """Reads an adapter and checks that it fits the model. Raises a ConfigurationError."""

    def serve(self, read: Iterable[Adapter], kept: Collection[str] = (), now: float = 0.0) -> None:
        """Serves the adapters in `read` from now on, and those already served whose names are in `kept`; no others."""

    def has(self, identity: str) -> bool: ...

    def asked_for(self, identity: str, now: float) -> None:
        """A request for this adapter has come."""

    def forget_others(self, used: Collection[str], now: float) -> None:
        """Forgets the adapters that are neither served, nor in `used`, which has identities, nor kept because they were replaced."""

    def seconds_until_look(self, now: float) -> float | None:
        """When `forget_others` has something to look at, even on a node that does nothing else; None: nothing is kept."""


class StepSlots(Protocol):
    @property
    def slots(self) -> int: ...

    @property
    def rank(self) -> int:
        """The rank of each slot."""

    @property
    def wanted(self) -> torch.Tensor | None:
        """int64 [T], each row's slot; None: no row has an adapter."""


class UpdatedLayer(Protocol):
    """One linear layer's updates, stacked for all slots."""

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def rows(self) -> StepSlots: ...

    @property
    def down(self) -> torch.Tensor | None:
        """[slots * rank, inputs]; None before an adapter changes the layer."""

    @property
    def up(self) -> torch.Tensor | None:
        """In the layout of library.RowUpdate."""


class UpdatedLayers(Protocol):
    """All linear layers that adapters may change."""

    @property
    def stacked(self) -> int:
        """How many layers compute updates in a step with adapters."""

    def of(self, module: nn.Module) -> UpdatedLayer | None:
        """The updates of a module that has not been replaced yet; None without any."""

    def leave(self, module: nn.Module) -> None:
        """A fused piece has replaced the module and adds its updates."""

    def step(self, slots: torch.Tensor | None, used: int) -> AbstractContextManager[None]:
        """Inside, the layers add the updates of a step. `slots` is int64 [T], the slot of each row's adapter, -1 without one; all are below
        `used`. With None no row has an adapter."""
