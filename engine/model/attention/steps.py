"""How the general forward pass sees attention over the paged cache, whichever kernels compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tandem.engine.model.batch import Batch, HostBatch
    from tandem.engine.model.decode_inputs import DecodeInputs


Rotary = tuple["torch.Tensor", "torch.Tensor"]
"""Cosines and sines, [T, D] each, their first half repeated in the second. Element i turns with i + D / 2."""


class AttentionStep(Protocol):
    """One step's attention. `attend` is called once per layer, in order."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [query heads, T, D]
        key: torch.Tensor,  # [KV heads, T, D]
        value: torch.Tensor,  # [KV heads, T, DV]
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Writes this step's keys and values, and returns [T, query heads, DV]. With `rotary`, queries and keys are
        turned by these angles first."""
        ...


class FixedAttention(Protocol):
    """Attention of decode steps of one shape, for a step that is recorded once and replayed."""

    def prepare(self, host: HostBatch | None) -> None:
        """What a replay needs beside its inputs; called before each one, and not recorded. None: all rows pad."""
        ...

    def begin(self) -> AttentionStep:
        """Called while the step is recorded. All that it computes follows from the inputs' tensors, on the device."""
        ...


class PagedAttention(Protocol):
    """One model's attention."""

    @property
    def reads_tables(self) -> bool:
        """Whether a fixed step reads block tables from its inputs: then their width is part of its shape."""
        ...

    def begin(self, batch: Batch) -> AttentionStep: ...
    def fixed(self, inputs: DecodeInputs) -> FixedAttention: ...
