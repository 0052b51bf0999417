"""The model's linear layers, and what adapters add to the rows that want them.

Slot s of a layer is rows [s * max_rank, (s + 1) * max_rank) of two stacked matrices. On CPUs our kernels read of them what each row's
own adapter has. Elsewhere a step multiplies all its rows by the stacks of the slots in use, two products for any number of adapters,
and clears between them what is not of a row's own adapter: so a row without one gets zeros, and shapes do not depend on who wants what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tandem.engine.model.fused.rotary import replace_forward
from tandem.engine.model.lora.folder import LayerUpdate
from tandem.engine.model.quantized.kernels import KernelLinear


class RowKernels(Protocol):
    """What reads of the stacks what each row's own adapter has (engine.model.fused.cpu.CpuPieces)."""

    def update(
        self,
        slots: torch.Tensor,
        rank: int,
        down: torch.Tensor,
        up: torch.Tensor,
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> None: ...


class _StepRows:
    """Which slots the step's rows want, and so which columns of the stacks each leaves out."""

    def __init__(self, kernels: RowKernels | None = None) -> None:
        self.kernels = kernels
        self.slots: torch.Tensor | None = None  # int64 [T]; None: no row wants an adapter
        self.rank = 0  # of a slot
        self.left_out: torch.Tensor | None = None  # bool [T, columns], without the kernels
        self.stacked = 0  # layers that have stacks; none ever loses them


class AdaptedLayer:
    """A linear layer's forward: its own, and then the update of each row's adapter."""

    def __init__(
        self, base: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], rows: _StepRows
    ) -> None:
        self._base = base
        self.inputs, self.outputs = shape
        self._rows = rows
        self._down: torch.Tensor | None = None  # [slots * rank, inputs]
        self._up: torch.Tensor | None = None  # [slots * rank, outputs]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._base(x)
        slots, left_out = self._rows.slots, self._rows.left_out
        if slots is None or self._down is None or self._up is None:
            return out
        if self._rows.kernels is not None:
            self._rows.kernels.update(slots, self._rows.rank, self._down, self._up, x, out)
            return out
        assert left_out is not None
        columns = left_out.shape[1]
        low = x.reshape(-1, self.inputs) @ self._down[:columns].T
        low.masked_fill_(left_out, 0)
        return torch.addmm(out.reshape(-1, self.outputs), low, self._up[:columns]).view_as(out)

    def put(
        self, slot: int, update: LayerUpdate | None, *, slots: int, rank: int, like: torch.Tensor
    ) -> None:
        """None: the adapter does not change this layer."""
        if self._down is None or self._up is None:
            if update is None:
                return
            self._down = like.new_zeros(slots * rank, self.inputs)
            self._up = like.new_zeros(slots * rank, self.outputs)
            self._rows.stacked += 1
        begin, end = slot * rank, (slot + 1) * rank
        self._down[begin:end] = 0
        self._up[begin:end] = 0
        if update is not None:
            own = slice(begin, begin + update.rank)
            self._down[own] = update.down.to(like.device, non_blocking=True)
            self._up[own] = update.up.T.to(like.device, non_blocking=True)


class AdaptedLayers:
    """All that an adapter may change. `unfit` says why it must not change others."""

    def __init__(
        self, layers: dict[str, AdaptedLayer], unfit: dict[str, str], rows: _StepRows, slots: int, rank: int
    ) -> None:
        self.layers = layers
        self.unfit = unfit
        self.slots = slots
        self.rank = rank
        self._rows = rows

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: (layer.inputs, layer.outputs) for name, layer in self.layers.items()}

    @property
    def stacked(self) -> int:
        """How many layers compute updates: as many products does a step with adapters have."""
        return self._rows.stacked

    @contextmanager
    def step(self, slots: torch.Tensor | None, used: int) -> Iterator[None]:
        """`slots`: int64 [T], each row's, -1 for the model itself. `used`: the first so many may be among them. None: no row has one."""
        if slots is None:
            yield
            return
        self._rows.slots, self._rows.rank = slots, self.rank
        if self._rows.kernels is None:
            columns = torch.arange(used * self.rank, device=slots.device) // self.rank
            self._rows.left_out = slots[:, None] != columns[None]
        try:
            yield
        finally:
            self._rows.slots = self._rows.left_out = None


def find_layers(
    model: nn.Module,
    run: Callable[[int], Any],
    *,
    slots: int,
    rank: int,
    kernels: RowKernels | None = None,
) -> AdaptedLayers:
    """Takes the place of the forward of each linear layer that computes all of a step's rows, in the step's order: `run` computes a
    step of so many tokens, the logits of the last alone."""
    tokens = 5
    seen: dict[nn.Module, set[int]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], _out: Any) -> None:
        one = len(args) == 1 and isinstance(args[0], torch.Tensor)
        seen.setdefault(module, set()).add(args[0].shape[:-1].numel() if one else 0)

    shapes = {module: shape for module in model.modules() if (shape := _shape_of(module)) is not None}
    hooks = [module.register_forward_hook(note) for module in shapes]
    try:
        run(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    rows = _StepRows(kernels)
    layers: dict[str, AdaptedLayer] = {}
    unfit: dict[str, str] = {}
    for name, module in model.named_modules():
        if module not in shapes:
            continue
        if module is head:
            unfit[name] = "the layer that makes logits, which adapters do not change here"
        elif module not in seen:
            unfit[name] = "which takes no part in computing text here"
        elif seen[module] != {tokens}:
            unfit[name] = "which does not compute every token of a step"
        else:
            layers[name] = layer = AdaptedLayer(module.forward, shapes[module], rows)
            replace_forward(module, layer)
    return AdaptedLayers(layers, unfit, rows, slots, rank)


def _shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer."""
    if isinstance(module, nn.Linear | KernelLinear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None
