"""Every model's work, by estimate from the shapes of its weights and its configuration.

A weight costs each token a multiplication and an addition. Of a mixture's experts a token uses its share. The head is computed for
sampled tokens alone, and an embedding is looked up. Attention costs each token two products with every token that it reads; of
layers with a window as if the window were full. What is small beside these (norms, rotations, activations) is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.content import weight_files
from tandem.engine.model.runner import ModelInfo, ModelWork
from tandem.engine.model.source import ModelSource


def capability(loading: ModelLoad) -> Capability | None:
    return EstimatedWork(loading)


class EstimatedWork(Capability):
    def __init__(self, loading: ModelLoad) -> None:
        self._source, self._config = loading.source, loading.config

    def complete(self, info: ModelInfo) -> ModelInfo:
        return msgspec.structs.replace(info, work=work_of(self._source, self._config, info))


_HEADER_BYTES = 8
_MOST_BYTES = 100 << 20  # the format's own limit of a header
_EMBEDDING = re.compile(r"(embed_tokens|wte|tok_embeddings|embeddings?)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out)\.weight$")
_EXPERT = re.compile(r"\.experts\b")
_OTHER_TOWERS = re.compile(r"(^|\.)(vision|visual|audio|connector|multi_modal)")


def work_of(source: ModelSource, config: Any, info: ModelInfo) -> ModelWork | None:
    """Returns None if the files do not say: GGUF files, weights that are packed in fewer bits, and an encoder and a decoder, of which a
    token goes through one."""
    if source.gguf_file is not None or getattr(config, "quantization_config", None) or info.encoder:
        return None
    try:
        shapes = [one for file in weight_files(source) for one in _shapes(file)]
    except (OSError, ValueError):
        return None
    text = _text_config(config)
    used, read, head, embedding = 0.0, 0, 0, 0
    for name, size in shapes:
        if _OTHER_TOWERS.search(name):
            continue
        if _HEAD.search(name):
            head = size
        elif _EMBEDDING.search(name):
            embedding = max(embedding, size)
        else:
            used += size * (_share_of_experts(text) if _EXPERT.search(name) else 1.0)
            read += size
    head = head or embedding  # they are the same weights
    heads = getattr(text, "num_attention_heads", 0) or info.num_kv_heads
    of_pair = 4.0 * heads * info.head_dim
    whole = sum(len(group.layers) for group in info.groups if group.keeps_every_token)
    windows = sum(len(group.layers) * group.window for group in info.groups if group.window)
    itemsize: int = getattr(torch, info.dtype).itemsize
    return ModelWork(
        flops_per_token=2.0 * used + of_pair * windows,
        flops_per_output=2.0 * head,
        flops_per_pair=of_pair * whole,
        weight_bytes=(read + head) * itemsize,
        kv_bytes_per_token=2 * whole * info.num_kv_heads * info.head_dim * itemsize,
    )


def _shapes(file: Path) -> Iterator[tuple[str, int]]:
    """Yields each matrix in a safetensors file with its number of weights."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(_HEADER_BYTES), "little")
        if length > _MOST_BYTES:
            raise ValueError("it is no safetensors file")
        header = json.loads(content.read(length))
    for name, described in header.items():
        if name != "__metadata__" and len(described["shape"]) >= 2:
            yield name, math.prod(described["shape"])


def _text_config(config: Any) -> Any:
    of_text = getattr(config, "get_text_config", None)
    return of_text() if of_text is not None else config


def _share_of_experts(text: Any) -> float:
    count = (
        getattr(text, "num_experts", None)
        or getattr(text, "num_local_experts", None)
        or getattr(text, "n_routed_experts", None)
    )
    used = getattr(text, "num_experts_per_tok", None)
    return min(used / count, 1.0) if count and used else 1.0
