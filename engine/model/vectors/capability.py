"""Vectors: a prompt's hidden states, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.vectors.pooler import Pooler
from tandem.engine.model.vectors.pooling import find_pooling
from tandem.wire.pooling import Pooling, VectorModel

if TYPE_CHECKING:
    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.loaded import ForwardShape, LoadedModel
    from tandem.engine.model.parts import RunnerPart
    from tandem.engine.model.runner import ModelInfo


def capability(loading: ModelLoad) -> Capability | None:
    pooling = find_pooling(loading.model.pooling, loading.source, loading.config)
    if pooling is None:
        return None
    if loading.shard is not None and loading.shard.stages > 1:
        raise ConfigurationError(
            f"{loading.source.name} makes vectors, which rank 0 reads below the model's head, and that is another stage's. Set "
            "pools.<pool>.pipeline_parallel to 1"
        )
    if loading.shard is not None and loading.shard.contexts > 1:
        raise ConfigurationError(
            f"{loading.source.name} makes vectors of all tokens of a prompt, and other ranks compute some. Set "
            "pools.<pool>.context_parallel to 1"
        )
    return PooledVectors(loading, pooling)


class PooledVectors(Capability):
    may_lack_head = True

    def __init__(self, loading: ModelLoad, pooling: Pooling) -> None:
        self._loading, self._pooling = loading, pooling
        self._size, self._generates = 0, True

    def planned(self, loaded: LoadedModel, plan: CachePlan) -> None:
        self._size, self._generates = loaded.vector_size, loaded.generates

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        return (Pooler(self._loading.device),)

    def complete(self, info: ModelInfo) -> ModelInfo:
        vectors = VectorModel(self._pooling, self._size, self._generates)
        return msgspec.structs.replace(info, vectors=vectors)
