"""What a model may be loaded with. `load_runner` and `load_general` ask each capability of a load in turn, and know none by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.content import ModelContent
from tandem.engine.model.source import ModelSource, Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.adapter_book import AdapterBook
    from tandem.engine.model.adapters import UpdatedLayers
    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.loaded import ForwardShape, LoadedModel
    from tandem.engine.model.parts import Drafter, RunnerPart, TokenMasks
    from tandem.engine.model.pieces import Pieces
    from tandem.engine.model.runner import Around, Forward, ModelInfo
    from tandem.engine.model.shard import ModelCut, Shard
    from tandem.engine.model.transformers_forward import ModelParts, TransformersForward


Found = TypeVar("Found")


def first_of(found: Iterable[Found | None]) -> Found | None:
    """What the first capability that has any gives."""
    return next((each for each in found if each is not None), None)


@dataclasses.dataclass(frozen=True)
class ModelLoad:
    """One load: what is asked for, and what the model's files say."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    source: ModelSource
    config: Any  # transformers' configuration, or a plain one
    dtype: torch.dtype
    device: torch.device
    threads: int
    progress: Progress
    # Waits for the model's identity; None on other ranks than 0.
    content: Callable[[], ModelContent] | None = None
    native: bool = True  # the native library may compute the model
    shard: Shard | None = None  # this process's part of the model; None: all of it


@dataclasses.dataclass(frozen=True)
class ToAttend:
    """What a loaded model's attention is chosen by."""

    kv_cache: torch.Tensor
    plan: CachePlan
    parts: ModelParts
    shape: ForwardShape
    pieces: Pieces | None
    dtype: torch.dtype  # the queries'; keys and values may be FP8


class Capability:
    """One thing that this load needs beyond tokens in and tokens out. Does nothing; each overrides what it needs. The methods are in the
    order in which they are called."""

    general = ""  # why transformers must compute the model; "": the native library may
    cut: ModelCut | None = None  # how this rank's part of the model is loaded; None: all of it
    unchanged = False  # the model is neither fused nor recorded
    loader: Any = None  # transformers' class that loads the model; None: the usual one
    may_lack_head = False  # the checkpoint may have no weights for the head
    bytes_per_block = 0  # what it keeps beside each block of the KV cache
    updates: UpdatedLayers | None = None  # what it adds to linear layers
    adapters: AdapterBook[Any] | None = None
    drafter: Drafter | None = None
    masks: TokenMasks | None = None
    fuses = False  # it has `fuse`

    def on_general_path(self, why: str) -> None:
        """transformers will compute the model, for this reason. Raises a ConfigurationError if it must not."""

    def load(self) -> LoadedModel | None:
        """Loads a model that is more than one decoder; None if the general path loads it. Its own methods up to `planned` are not called
        for a model that a capability has loaded. General path only."""
        return None

    def check(self, model: PreTrainedModel) -> None:
        """The model is loaded; raises a ConfigurationError if its attention cannot be found as it is. General path only."""

    def refuse(self, parts: ModelParts) -> None:
        """Raises a ConfigurationError for a model with parts that this cannot work with. General path only."""

    def weights_aside(self, model: PreTrainedModel) -> int:
        """How many weights are in linear layers that only this uses. General path only."""
        return 0

    def find(self, model: PreTrainedModel, pieces: Pieces | None) -> None:
        """Before the first of the model's layers is replaced, and again if the model had to be loaded again. General path only."""

    def pieces(self, dtype: torch.dtype) -> Pieces | None:
        """The operations that parts of the model are fused into on this device; None if it has none. General path only."""
        return None

    def fuse(self, model: PreTrainedModel, pieces: Pieces, updates: UpdatedLayers | None) -> int | None:
        """Replaces what can be fused. Returns how many weights are left in linear layers that were not fused; None if the model computes
        something else now, and must be loaded again. General path only."""
        raise NotImplementedError

    def change(self, model: PreTrainedModel) -> None:
        """After the model is fused, if it is. General path only."""

    def placed(self, loaded: LoadedModel, model: PreTrainedModel) -> LoadedModel:
        """Returns what is loaded, as the other ranks see it. A collective. General path only."""
        return loaded

    def attention(self, of: ToAttend) -> PagedAttention | None:
        """Attention by kernels that read the cache in place; None if blocks are gathered. General path only."""
        return None

    def exchanged(self, attention: PagedAttention, of: ToAttend) -> PagedAttention:
        """Returns the attention that the model is computed with, for one that knows only this rank's rows. General path only."""
        return attention

    def recorded(self, forward: TransformersForward, plan: CachePlan, shape: ForwardShape) -> Forward | None:
        """A forward pass that replays recorded steps of this one; None if it has none. General path only."""
        return None

    def step_memory(
        self, model: PreTrainedModel, parts: ModelParts, vocab_size: int
    ) -> Callable[[ForwardShape, int], int] | None:
        """See LoadedModel.beside_cache. General path only."""
        return None

    def around(self, model: PreTrainedModel) -> Around | None:
        """What happens around each forward pass; None for nothing. General path only."""
        return None

    def planned(self, loaded: LoadedModel, plan: CachePlan) -> None:
        """The model is loaded and its KV cache is planned; further weights may be loaded now."""

    def beside_cache(self, shape: ForwardShape, tokens: int) -> int:
        """The bytes on the device that its part of a step takes besides the KV cache."""
        return 0

    def connect(self) -> None:
        """The KV cache is allocated, and the forward pass is made next."""

    def leading(self, forward: Forward, loaded: LoadedModel) -> Forward:
        """Returns the forward pass that the runner calls."""
        return forward

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        """The KV cache is allocated: allocates its own, and returns its parts of the runner."""
        return ()

    def complete(self, info: ModelInfo) -> ModelInfo:
        return info
