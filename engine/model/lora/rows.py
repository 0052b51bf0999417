"""Computes what adapters add to the rows of one linear layer.

Slot s of a layer is a part of two stacked matrices. On CPUs our kernels read only the part of each row's own adapter, if possible while they
compute the layer. Elsewhere a step multiplies all its rows by the stacks of the slots in use, with two products for any number of adapters.
Between the products it zeroes the columns that are not of a row's own adapter. So a row without an adapter gets zeros, and the shapes do not
depend on which rows have which adapter.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.engine.model.adapters import LayerUpdate


class RowKernels(Protocol):
    """Kernels that read only each row's own adapter from the stacks (engine.model.fused.cpu.CpuPieces)."""

    @property
    def lanes(self) -> int:
        """How many of a layer's outputs are stored together in a stack, for all ranks of a slot."""

    def update(self, layer: AdaptedLayer, x: torch.Tensor, out: torch.Tensor) -> None: ...


class StepRows:
    """The slots of a step's rows, and so the columns of the stacks that each row leaves out."""

    def __init__(self, slots: int, rank: int, kernels: RowKernels | None = None) -> None:
        self.slots, self.rank = slots, rank  # the number of slots, and the rank of each
        self.kernels = kernels
        self.wanted: torch.Tensor | None = None  # int64 [T], each row's slot; None: no row has an adapter
        self.left_out: torch.Tensor | None = None  # bool [T, columns]; only without the kernels
        self.stacked = 0  # layers that have stacks, which they never lose


class AdaptedLayer:
    """The stacks of one linear layer, and the updates that they add to its rows."""

    def __init__(self, shape: tuple[int, int], rows: StepRows) -> None:
        self.inputs, self.outputs = shape
        self.rows = rows
        self.down: torch.Tensor | None = None  # [slots * rank, inputs]
        # [slots * rank, outputs], or for kernels in the layout of library.RowUpdate.
        self.up: torch.Tensor | None = None

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns `out` plus the updates of this step's adapters. It may change `out` in place."""
        rows = self.rows
        if rows.wanted is None or self.down is None or self.up is None:
            return out
        if rows.kernels is not None:
            rows.kernels.update(self, x, out)
            return out
        assert rows.left_out is not None
        columns = rows.left_out.shape[1]
        low = x.reshape(-1, self.inputs) @ self.down[:columns].T
        low.masked_fill_(rows.left_out, 0)
        return torch.addmm(out.reshape(-1, self.outputs), low, self.up[:columns]).view_as(out)

    def put(self, slot: int, update: LayerUpdate | None, like: torch.Tensor) -> None:
        """Copies an adapter's update into a slot. With None the adapter does not change this layer, and the slot is zeroed."""
        slots, rank = self.rows.slots, self.rows.rank
        if self.down is None or self.up is None:
            if update is None:
                return
            self.down = like.new_zeros(slots * rank, self.inputs)
            self.up = like.new_zeros(self._shape_of_up(like.element_size()))
            self.rows.stacked += 1
        begin, end = slot * rank, (slot + 1) * rank
        self.down[begin:end] = 0
        if self.rows.kernels is None:
            up = self.up[begin:end]
        else:
            _, vectors, pairs, lanes, pair = self.up.shape
            up = like.new_zeros(pairs * pair, vectors * lanes)
        up[:] = 0
        if update is not None:
            self.down[begin : begin + update.rank] = update.down.to(like.device, non_blocking=True)
            up[: update.rank, : self.outputs] = update.up.T.to(like.device, non_blocking=True)
        if self.rows.kernels is not None:
            self.up[slot] = up.view(pairs, pair, vectors, lanes).permute(2, 0, 3, 1)

    def _shape_of_up(self, element_size: int) -> tuple[int, ...]:
        slots, rank = self.rows.slots, self.rows.rank
        if self.rows.kernels is None:
            return slots * rank, self.outputs
        lanes, pair = self.rows.kernels.lanes, 4 // element_size
        return slots, -(-self.outputs // lanes), -(-rank // pair), lanes, pair
