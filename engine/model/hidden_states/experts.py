"""Notes which experts a model's routers choose for each token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.model.leftovers import layer_of


class RoutedExperts:
    """The choices of the last pass. `layers` are those with a router: none in a model without experts, or whose experts get rows that
    are sorted already (Llama 4)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._noted: dict[int, torch.Tensor] = {}
        self.layers: list[int] = []
        for name, module in model.named_modules():
            # transformers' modules of experts take the rows, the chosen experts and their weights.
            given = list(inspect.signature(module.forward).parameters)[1:2]
            layer = layer_of(f"{name}.")
            if layer is not None and given and given[0] in ("top_k_index", "router_indices"):
                self.layers.append(layer)
                module.register_forward_pre_hook(self._note(layer))

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """[tokens, layers, experts per token] for these rows of the last pass, in host memory."""
        chosen = [self._noted[layer][begin:end] for layer in self.layers]
        return torch.stack(chosen, dim=1).to("cpu", torch.int16)

    def _note(self, layer: int) -> Any:
        def note(_module: nn.Module, given: tuple[Any, ...]) -> None:
            self._noted[layer] = given[1].flatten(0, -2)

        return note
