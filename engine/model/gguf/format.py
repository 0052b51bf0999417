"""GGUF files as a format of weights. The native library computes with their blocks; elsewhere transformers makes ordinary matrices of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.model.source import ModelSource
from tandem.engine.model.weight_formats import PartOf, StoredTensors, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_config(source: ModelSource) -> Any:
    if source.gguf_file is None:
        return None
    # Imported here because few models are GGUF files.
    from tandem.engine.model.gguf.metadata import Metadata, refuse_parts, refuse_uneven_heads, whole_config
    from tandem.engine.model.gguf.plain import plain_config

    metadata = Metadata(source)
    refuse_parts(metadata)
    refuse_uneven_heads(metadata)
    return plain_config(metadata) or whole_config(source)


def weight_format(source: ModelSource, config: Any) -> WeightFormat | None:
    return GgufFile(source) if source.gguf_file is not None else None


class GgufFile(WeightFormat):
    uncut = "is a GGUF file, whose matrices are not cut"
    always_has_head = True

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def compute_dtype(self, stored: Callable[[], torch.dtype]) -> torch.dtype:
        # Its weights have fewer bits than bfloat16 keeps, unless they were stored in full precision.
        return torch.bfloat16

    def stored_tensors(self, config: Any) -> StoredTensors | None:
        from tandem.engine.model.gguf.tensors import read_tensors

        return read_tensors(self._source, config)

    def loading_options(self, config: Any, *, in_parts: bool = False) -> dict[str, Any]:
        from tandem.engine.model.gguf.metadata import loading_options

        return loading_options(self._source, config)

    def finish_loading(
        self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, part_of: PartOf | None = None
    ) -> None:
        from tandem.engine.model.gguf.metadata import finish_loading

        finish_loading(self._source, model)
