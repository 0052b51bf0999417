"""Keeps the inputs of chosen layers in each pass, for whatever reads hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.base.errors import ConfigurationError


class ObservedLayers:
    """The inputs of some layers in the last pass, numbered as in transformers' `output_hidden_states`: 0 is the first layer's input, the
    tokens' embeddings, and the last number is the head's input. Negative numbers count from the end."""

    def __init__(self, name: str, model: PreTrainedModel, numbers: Sequence[int]) -> None:
        layers = _layers_of(name, model)
        total = len(layers)
        for number in numbers:
            if not -total - 1 <= number <= total:
                raise ConfigurationError(
                    f"model.hidden_states_layers has {number}, and {name} has {total} layers: the numbers are 0, the tokens' embeddings, "
                    f"to {total}, what the head reads; or -1 to {-total - 1}, counted from the end"
                )
        self.numbers = [number % (total + 1) for number in numbers]
        self._noted: dict[int, torch.Tensor] = {}
        for number in set(self.numbers):
            if number < total:
                layers[number].register_forward_pre_hook(self._note_input(number), with_kwargs=True)
            else:
                model.base_model.register_forward_hook(self._note_output(number))

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """[tokens, layers, hidden size] for these rows of the last pass, in host memory."""
        return self.states(begin, end).cpu()

    def states(self, begin: int, end: int) -> torch.Tensor:
        """The same, on the model's device."""
        return torch.stack([self._noted[number][0, begin:end] for number in self.numbers], dim=1)

    def _note_input(self, number: int) -> Any:
        def note(_module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            # Later layers may change this tensor in place.
            self._noted[number] = (given[0] if given else named["hidden_states"]).clone()

        return note

    def _note_output(self, number: int) -> Any:
        def note(_module: nn.Module, _given: Any, output: Any) -> None:
            self._noted[number] = output[0]

        return note


def _layers_of(name: str, model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigurationError(f"{name} keeps its layers in no list: leave model.hidden_states_folder out")
