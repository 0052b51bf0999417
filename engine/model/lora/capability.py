"""Adapters, if `scheduler.max_loras` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tandem.base.errors import ConfigurationError
from tandem.engine.model.capabilities import Capability, ModelLoad

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.loaded import ForwardShape, LoadedModel
    from tandem.engine.model.lora.layers import AdaptedLayers
    from tandem.engine.model.lora.rows import RowKernels
    from tandem.engine.model.lora.slots import AdapterSlots
    from tandem.engine.model.parts import RunnerPart
    from tandem.engine.model.pieces import Pieces
    from tandem.engine.model.transformers_forward import ModelParts


def capability(loading: ModelLoad) -> Capability | None:
    return AdapterCapability(loading) if loading.scheduler.max_loras else None


class AdapterCapability(Capability):
    general = "scheduler.max_loras asks for adapters"

    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading
        self.updates: AdaptedLayers | None = None
        self.adapters: AdapterSlots | None = None

    def refuse(self, parts: ModelParts) -> None:
        if parts.mixers is not None:
            why = "keeps recurrent states, whose layers are computed request by request"
        elif parts.own is not None:
            why = "has layers that attend by their own code, request by request"
        elif parts.latents is not None:
            why = "keeps latents, whose matrices are not multiplied with every token"
        else:
            return
        raise ConfigurationError(
            f"{self._loading.source.name} cannot be served with adapters: it {why}. Set scheduler.max_loras to 0, and merge the "
            "adapter into the model's weights"
        )

    def find(self, model: PreTrainedModel, pieces: Pieces | None) -> None:
        from tandem.engine.model.lora.layers import find_layers
        from tandem.engine.model.transformers_forward import run_without_attention

        self.updates = find_layers(
            model,
            lambda tokens: run_without_attention(model, tokens, 1, model.device),
            slots=self._loading.scheduler.max_loras,
            rank=self._loading.model.max_lora_rank,
            kernels=cast("RowKernels", pieces) if pieces is not None and pieces.adds_updates else None,
        )

    def change(self, model: PreTrainedModel) -> None:
        from tandem.engine.model.lora.slots import AdapterSlots

        assert self.updates is not None
        self.updates.take_place()
        self.adapters = AdapterSlots(self.updates, model.dtype, self._loading.device)

    def planned(self, loaded: LoadedModel, plan: CachePlan) -> None:
        assert self.adapters is not None
        wanted, read = self._loading.model.adapters, []
        for place, (name, folder) in enumerate(wanted.items()):
            self._loading.progress(f"reading the adapter {name}", place / len(wanted))
            read.append(self.adapters.read(name, Path(folder)))
        self.adapters.serve(read)

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        from tandem.engine.model.lora.slots import AdaptedRequests

        assert self.adapters is not None
        return (AdaptedRequests(self.adapters),)
