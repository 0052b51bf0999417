"""An adapter's folder as updates of this model's layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.adapters import Adapter, LayerUpdate
from tandem.engine.model.peft_folder import ALL_LINEAR, CONFIG_FILE, WEIGHTS_FILE, PeftFolder, read_peft_folder, some_of


def read_adapter(
    name: str,
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    unfit: Mapping[str, str],
    *,
    max_rank: int,
    dtype: torch.dtype,
) -> Adapter:
    """Reads and checks an adapter. `layers` has the inputs and outputs of the layers that it may change, `unfit` why it must not change
    others. Raises a ConfigurationError."""
    read = read_peft_folder(name, folder, max_rank, layers)
    _check_layers(read, layers, unfit)
    updates = {layer: _update(read, layer, layers[layer], dtype) for layer in read.pairs}
    return Adapter(name, read.digest, updates)


def _check_layers(read: PeftFolder, layers: Collection[str], unfit: Mapping[str, str]) -> None:
    about, config = read.about, read.config
    for layer in read.pairs:
        if layer in unfit:
            raise ConfigurationError(f"{about} cannot be served: it changes {layer}, {unfit[layer]}")
    foreign = [layer for layer in read.pairs if layer not in layers]
    if foreign:
        raise ConfigurationError(
            f"{about} is not for this model, which has no linear layer {some_of(foreign)}: name the model that it was trained on"
        )
    if config.target_modules in (None, ALL_LINEAR):
        return
    absent = [layer for layer in layers if layer not in read.pairs and config.targets(layer)]
    if absent:
        raise ConfigurationError(
            f"{about}: {WEIGHTS_FILE} lacks {some_of(absent)}, which target_modules in {CONFIG_FILE} names"
        )


def _update(read: PeftFolder, layer: str, shape: tuple[int, int], dtype: torch.dtype) -> LayerUpdate:
    down, up = read.pairs[layer]
    inputs, outputs = shape
    if (down.shape[1], up.shape[0]) != shape:
        raise ConfigurationError(
            f"{read.about} does not fit this model: {layer} is updated from {down.shape[1]} numbers to {up.shape[0]}, and has "
            f"{inputs} and {outputs}"
        )
    scaled = up.float() * read.config.scale(layer)
    update = LayerUpdate(down.to(dtype).contiguous(), scaled.to(dtype).contiguous())
    if not (torch.isfinite(update.down).all() and torch.isfinite(update.up).all()):
        raise ConfigurationError(
            f"{read.about} cannot be served: its update of {layer} has numbers that are infinite in "
            f"{str(dtype).removeprefix('torch.')}, in which this model computes"
        )
    return update
