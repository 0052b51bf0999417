"""Reads a file's tensors for the native library: matrices in blocks stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.quants import dequantize

from tandem.engine.model.gguf.metadata import FACTORS, Metadata, misfit, places, refuse_rest
from tandem.engine.model.native.forward import rotary_of
from tandem.engine.model.source import ModelSource
from tandem.kernels.library import BLOCKS, BlockRows, Weights

# Architectures whose tensors differ from the checkpoint's only in their names, and in the order of rows that `_in_order` undoes. Others
# are read by transformers.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class NativeTensors:
    """The weights of one file, by the names that they have in a checkpoint of safetensors."""

    def __init__(self, source: ModelSource, config: Any) -> None:
        metadata = Metadata(source)
        self._config, self._source = config, source
        self._architecture = metadata.general("general.architecture")
        if self.known:
            arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self._architecture)
            self._names = get_tensor_name_map(arch, config.num_hidden_layers)
        self._tensors = metadata.tensors
        self._left = dict(self._tensors)

    @property
    def known(self) -> bool:
        return self._architecture in _ARCHITECTURES

    def take(self, name: str) -> Weights | None:
        theirs = self._names.get_name(name, (".weight", ".bias"))
        tensor = self._tensors.get(theirs)
        if tensor is None:
            return None
        self._left.pop(theirs, None)
        kind = tensor.tensor_type.name
        if kind in BLOCKS and len(tensor.shape) == 2:
            # Rows that are in order already stay in the mapped file.
            return BlockRows(np.ascontiguousarray(self._in_order(theirs, tensor.data)), kind)
        return torch.from_numpy(
            np.array(self._in_order(theirs, dequantize(tensor.data, tensor.tensor_type)), np.float32)
        )

    def _in_order(self, name: str, rows: Any) -> Any:
        """llama.cpp lets the two numbers that a rotation turns together follow each other; checkpoints have them half a head apart."""
        if self._architecture != "llama" or not any(part in name for part in (".attn_q.", ".attn_k.")):
            return rows
        config = self._config
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    def rotary(self) -> tuple[torch.Tensor, float]:
        """The inverse frequencies and the scaling."""
        frequencies, scaling = rotary_of(self._config)
        if FACTORS in self._tensors:
            factors = torch.tensor(self._tensors[FACTORS].data)
            if factors.shape != frequencies.shape:
                raise misfit(self._source.name)
            frequencies = frequencies / factors
        return frequencies, scaling

    def refuse_rest(self) -> None:
        """Refuses a file with tensors that were not taken, once the model is loaded."""
        taken = {name: tensor for name, tensor in self._tensors.items() if name not in self._left}
        refuse_rest(self._source.name, places(self._tensors), sum(map(_size, taken.values())), self._config)


def _size(tensor: Any) -> int:
    return int(tensor.n_elements)


def read_tensors(source: ModelSource, config: Any) -> NativeTensors | None:
    """None for a file that transformers must read."""
    tensors = NativeTensors(source, config)
    return tensors if tensors.known else None
