"""Finds the linear layers that an adapter may change, and makes their forward add the adapters' updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.lora.rows import AdaptedLayer, RowKernels, StepRows
from tandem.engine.model.pieces import replace_forward


class AdaptedLayers:
    """The layers that adapters may change. `unfit` says why they must not change the others."""

    def __init__(self, layers: dict[str, AdaptedLayer], unfit: dict[str, str], rows: StepRows) -> None:
        self.layers = layers
        self.unfit = unfit
        self._rows = rows
        self._modules: dict[nn.Module, AdaptedLayer] = {}

    @property
    def slots(self) -> int:
        return self._rows.slots

    @property
    def rank(self) -> int:
        return self._rows.rank

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: (layer.inputs, layer.outputs) for name, layer in self.layers.items()}

    @property
    def stacked(self) -> int:
        return self._rows.stacked

    def of(self, module: nn.Module) -> AdaptedLayer | None:
        """The adapted layer of a module that has not been replaced yet; None without one."""
        return self._modules.get(module)

    def watch(self, module: nn.Module, layer: AdaptedLayer) -> None:
        self._modules[module] = layer

    def leave(self, module: nn.Module) -> None:
        """A fused piece has replaced the module and adds its updates, so `take_place` leaves the module alone."""
        self._modules.pop(module, None)

    def take_place(self) -> None:
        """Wraps the forward of each module that was not passed to `leave`, so that it adds the updates."""
        while self._modules:
            module, layer = self._modules.popitem()
            replace_forward(module, _with_updates(module.forward, layer))

    @contextmanager
    def step(self, slots: torch.Tensor | None, used: int) -> Iterator[None]:
        """See engine.model.adapters.UpdatedLayers."""
        if slots is None:
            yield
            return
        self._rows.wanted = slots
        if self._rows.kernels is None:
            columns = torch.arange(used * self.rank, device=slots.device) // self.rank
            self._rows.left_out = slots[:, None] != columns[None]
        try:
            yield
        finally:
            self._rows.wanted = self._rows.left_out = None


def _with_updates(
    base: Callable[[torch.Tensor], torch.Tensor], layer: AdaptedLayer
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: layer.add_to(base(x), x)


def find_layers(
    model: nn.Module, run: Callable[[int], Any], *, slots: int, rank: int, kernels: RowKernels | None = None
) -> AdaptedLayers:
    """Finds each linear layer that computes all of a step's rows in the step's order. `run` computes a step of the given number of tokens,
    with logits for the last one only. The layers add nothing before `take_place`, so fused pieces may replace some of them before that
    (engine.model.fused)."""
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
    rows = StepRows(slots, rank, kernels)
    found = AdaptedLayers({}, {}, rows)
    for name, module in model.named_modules():
        if module not in shapes:
            continue
        if module is head:
            found.unfit[name] = "the layer that makes logits, which adapters do not change here"
        elif module not in seen:
            found.unfit[name] = "which takes no part in computing text here"
        elif seen[module] != {tokens}:
            found.unfit[name] = "which does not compute every token of a step"
        else:
            found.layers[name] = layer = AdaptedLayer(shapes[module], rows)
            found.watch(module, layer)
    return found


def _shape_of(module: nn.Module) -> tuple[int, int] | None:
    """The inputs and outputs of a linear layer; None for another module."""
    if isinstance(module, nn.Linear | KernelLinear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None
