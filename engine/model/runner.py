"""The model's side of a step, as the engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.cache.groups import KVCacheGroup
from engine.scheduling.output import ModelOutput, SchedulerOutput

if TYPE_CHECKING:
    import torch

    from engine.structured.grammars import Grammars


class ModelInfo(msgspec.Struct, frozen=True):
    """What the rest of the engine must know of a loaded model."""

    name: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[KVCacheGroup, ...]
    num_blocks: int


class LayerHooks(Protocol):
    """Called inside the forward pass, so that a connector can overlap transfers with it."""

    def wait_for_layer_load(self, layer: int) -> None: ...
    def save_kv_layer(self, layer: int) -> None: ...


class ModelRunner(Protocol):
    """Owns the weights and the KV cache tensor. Used from the engine's step thread only."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def kv_cache(self) -> torch.Tensor:
        """[num_blocks, slots, 2, num_kv_heads, block_size, head_dim]: see kvtransfer.base.KVCacheMemory."""
        ...

    @property
    def grammars(self) -> Grammars | None:
        """What compiles grammars for this model's tokenizer; None where none are served."""
        ...

    def execute(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> ModelOutput: ...

    def forget_requests(self) -> None:
        """Between two engines: the next one knows none of the last one's. Only when no step is under way."""
        ...
