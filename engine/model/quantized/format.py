"""Quantized checkpoints as a format of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tandem.engine.model.plain_config import PlainConfig
from tandem.engine.model.quantized.formats import QuantizedCheckpoint, read_checkpoint
from tandem.engine.model.source import ModelSource
from tandem.engine.model.weight_formats import PartOf, StoredTensors, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_config(source: ModelSource) -> Any:
    return None


def weight_format(source: ModelSource, config: Any) -> WeightFormat | None:
    if source.gguf_file is not None:
        return None
    from tandem.engine.model.checkpoint import translated_errors  # which looks for formats itself

    with translated_errors(source):
        found = read_checkpoint(source, config)
    return QuantizedMatrices(source, found) if found is not None else None


class QuantizedMatrices(WeightFormat):
    def __init__(self, source: ModelSource, checkpoint: QuantizedCheckpoint) -> None:
        self._source, self._checkpoint = source, checkpoint

    def reads(self, device: torch.device, *, in_parts: bool) -> bool:
        # On a GPU transformers has kernels that keep the experts of one rank in FP8.
        return in_parts or device.type == "cpu" or self._checkpoint.method != "fp8" or not self._has_experts()

    def _has_experts(self) -> bool:
        from tandem.engine.model.quantized.experts import experts_in

        return bool(experts_in(self._checkpoint))

    def compute_dtype(self, stored: Callable[[], torch.dtype]) -> torch.dtype:
        # The kernels for quantized matrices compute in bfloat16, on a CPU and on a GPU.
        return torch.bfloat16 if (found := stored()) is torch.float16 else found

    def plain(self, config: Any) -> Any:
        if isinstance(config, PlainConfig):
            return msgspec.structs.replace(config, quantization_config=None)
        plain = copy.deepcopy(config)
        plain.quantization_config = None
        return plain

    def stored_tensors(self, config: Any) -> StoredTensors | None:
        from tandem.engine.model.quantized.tensors import IntegerTensors

        return IntegerTensors(self._source, self._checkpoint, self.plain(config))

    def loading_options(self, config: Any, *, in_parts: bool = False) -> dict[str, Any]:
        from tandem.engine.model.quantized.loading import loading_options

        if isinstance(config, PlainConfig):
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(self._source.folder, trust_remote_code=False)
        return loading_options(config, self._checkpoint, in_parts)

    def unread(self, keys: list[str], model: PreTrainedModel) -> list[str]:
        from tandem.engine.model.quantized.loading import unread

        return unread(keys, model)

    def finish_loading(
        self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, part_of: PartOf | None = None
    ) -> None:
        from tandem.engine.model.quantized.loading import finish_loading

        finish_loading(self._source, model, dtype, device, part_of)
