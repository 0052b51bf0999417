"""Hidden states for requests that ask for a file of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.engine.model.capabilities import Capability, ModelLoad

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.hidden_states.experts import RoutedExperts
    from tandem.engine.model.loaded import ForwardShape
    from tandem.engine.model.observed import ObservedLayers
    from tandem.engine.model.parts import RunnerPart


def capability(loading: ModelLoad) -> Capability | None:
    model = loading.model
    return WrittenStates(loading) if model.hidden_states_folder and model.hidden_states_layers else None


class WrittenStates(Capability):
    general = "model.hidden_states_folder asks for hidden states"
    unchanged = True

    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading
        self._observed: ObservedLayers | None = None
        self._experts: RoutedExperts | None = None

    def change(self, model: PreTrainedModel) -> None:
        from tandem.engine.model.hidden_states.experts import RoutedExperts  # they need transformers
        from tandem.engine.model.observed import ObservedLayers

        self._experts = RoutedExperts(model)
        self._observed = ObservedLayers(self._loading.source.name, model, self._loading.model.hidden_states_layers)

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        from tandem.engine.model.hidden_states.prompts import HiddenStates

        shard = self._loading.shard
        if self._observed is None or self._experts is None or (shard is not None and shard.rank > 0):
            return ()
        return (HiddenStates(self._observed, self._experts, self._loading.model.hidden_states_folder),)
