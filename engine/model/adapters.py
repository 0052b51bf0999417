"""What Tandem's engine knows of LoRA adapters outside `lora/`: what they add to linear layers."""

from __future__ import annotations

from contextlib import AbstractContextManager
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
