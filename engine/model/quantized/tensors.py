"""Reads a checkpoint's tensors for the native library: integers of 4 and 8 bits stay so."""

from __future__ import annotations

from typing import Any

import torch

from tandem.engine.model.leftovers import refuse_leftovers
from tandem.engine.model.native.forward import Checkpoint, rotary_of
from tandem.engine.model.quantized.blocks import read_blocks
from tandem.engine.model.quantized.formats import QuantizedCheckpoint, dense, kind_of, sizes_of, unknown_bias
from tandem.engine.model.quantized.parts import CheckpointFiles
from tandem.engine.model.source import ModelSource
from tandem.kernels.library import Weights

_CPU = torch.device("cpu")


class IntegerTensors:
    """The weights of one checkpoint, by the names that they have in an ordinary one."""

    def __init__(self, source: ModelSource, checkpoint: QuantizedCheckpoint, config: Any) -> None:
        self._source, self._checkpoint, self._config = source, checkpoint, config
        self._ordinary = Checkpoint(source.folder)
        self._files = CheckpointFiles(source)
        self._taken: set[str] = set()

    def take(self, name: str) -> Weights | None:
        layer, _, part = name.rpartition(".")
        layers = self._checkpoint.layers
        if layer not in layers:
            layer = layer.removeprefix("model.")  # of a model that was saved without its head
        if part != "weight" or layer not in layers:
            return self._ordinary.take(name)
        facts = layers[layer]
        self._taken.update(f"{layer}.{each}" for each in facts if each != "bias")

        def read(tensor: str, at: tuple[slice, ...]) -> torch.Tensor:
            return self._files.read(f"{layer}.{tensor}", at, _CPU)

        size = sizes_of(kind_of(facts, self._checkpoint.method), facts, self._checkpoint.bits)
        if size is None:
            outputs, inputs = (int(each) for each in read("weight_shape", ()))
            size = outputs, inputs
        blocks = read_blocks(facts, self._checkpoint, size, read)
        return dense({each: read(each, ()) for each in facts}, self._checkpoint) if blocks is None else blocks

    def rotary(self) -> tuple[torch.Tensor, float]:
        """The inverse frequencies and the scaling."""
        return rotary_of(self._config)

    def refuse_rest(self) -> None:
        """Refuses a checkpoint with tensors that were not taken, once the model is loaded."""
        left = self._ordinary.left - self._taken
        biases = {f"{layer}.bias" for layer in self._checkpoint.layers} & left
        for name in sorted(biases):
            # Tools for GPTQ add zeros to models without biases.
            if bool(self._files.read(name, (), _CPU).any()):
                raise unknown_bias(self._source.name, name.removesuffix(".bias"))
        refuse_leftovers(self._source.name, left - biases, self._config)
