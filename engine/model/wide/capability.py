"""A model on several ranks: this rank's part of it."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.shard import MatrixPart, Shard
from tandem.engine.model.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.loaded import LoadedModel
    from tandem.engine.model.runner import Forward
    from tandem.engine.model.transformers_forward import ModelParts


def capability(loading: ModelLoad) -> Capability | None:
    return OnePart(loading, loading.shard) if loading.shard is not None else None


class RankCut:
    """See engine.model.shard.ModelCut."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.device_map = shard.width == 1

    def loader(self, source: ModelSource) -> tuple[Any, dict[str, Any]] | None:
        from tandem.engine.model.wide.stages import class_of_stage  # it needs transformers

        if self._shard.stages == 1:
            return None
        made, config = class_of_stage(source, self._shard)
        return made, {"config": config}

    def part(self, source: ModelSource, device: torch.device) -> AbstractContextManager[dict[str, Any]]:
        from tandem.engine.model.wide import cut

        if self._shard.width == 1:
            return cut.loading_stage()
        return cut.loading_part(source, self._shard.of_stage(), device)

    def is_elsewhere(self, key: str, model: PreTrainedModel) -> bool:
        from tandem.engine.model.wide.stages import is_elsewhere

        return self._shard.stages > 1 and is_elsewhere(key, model, self._shard)

    def part_of(self, model: PreTrainedModel, where: str) -> MatrixPart:
        from tandem.engine.model.wide import cut

        return cut.part_of(model, where, self._shard.of_stage())

    def finish(self, name: str, model: PreTrainedModel) -> None:
        from tandem.engine.model.wide import cut, joint_sums, stages

        if self._shard.width > 1:
            cut.join_parts(name, model, self._shard.of_stage())
            joint_sums.join_sums(model, self._shard.of_stage())
        if self._shard.stages > 1:
            stages.finish_stage(model, self._shard)


class OnePart(Capability):
    def __init__(self, loading: ModelLoad, shard: Shard) -> None:
        self._loading, self._shard = loading, shard
        self.cut = RankCut(shard)

    def check(self, model: PreTrainedModel) -> None:
        from tandem.engine.model.transformers_forward import run_without_attention
        from tandem.engine.model.wide.stages import check_stage

        if self._shard.stages > 1:
            device = self._loading.device
            check_stage(model, lambda: run_without_attention(model, 3, 3, device), self._shard)

    def refuse(self, parts: ModelParts) -> None:
        if parts.mixers is not None:
            why = "keeps recurrent states"
        elif parts.own is not None:
            why = "has layers that attend by their own code"
        else:
            return
        raise ConfigurationError(
            f"{self._loading.source.name} cannot be served on several ranks: it {why}. Set pools.<pool>.tensor_parallel to 1"
        )

    def placed(self, loaded: LoadedModel, model: PreTrainedModel) -> LoadedModel:
        """The layers of all stages, the heads whose keys and values this rank keeps, and the layers of its stage."""
        from tandem.engine.model.wide.cut import heads_kept, place_heads
        from tandem.engine.model.wide.stages import heads_of_all, layers_of_all

        shard, name, layers = self._shard, self._loading.source.name, loaded.layers
        heads = of_stage = None
        if shard.kv_memory is not None:
            layers = place_heads(name, model, layers, shard.of_stage())
        else:
            heads = heads_kept(name, model, layers, shard.of_stage())
        if shard.stages > 1:
            if shard.kv_memory is None:
                of_stage = frozenset(layer.index for layer in layers)
                heads = heads_of_all(heads, shard)
            layers = layers_of_all(layers, shard)
        return dataclasses.replace(loaded, layers=layers, heads=heads, of_stage=of_stage)

    def connect(self) -> None:
        from tandem.engine.model.wide.stages import meet

        if self._shard.stages > 1:
            meet(self._shard, self._loading.device)

    def leading(self, forward: Forward, loaded: LoadedModel) -> Forward:
        from tandem.engine.model.wide.forward import LeadingForward

        if self._shard.lead is None:
            return forward
        attending = [layer.index for layer in loaded.layers if layer.reads_of is None]
        return LeadingForward(forward, self._shard, self._shard.lead, attending)
