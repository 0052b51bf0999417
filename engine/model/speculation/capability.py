"""Drafts: from the text itself, or from what `model.draft` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.config import OWN_HEAD
from tandem.engine.model.batching import RequestRows
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.parts import Drafts
from tandem.engine.model.source import find_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel

    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.loaded import ForwardShape, LoadedModel
    from tandem.engine.model.observed import ObservedLayers
    from tandem.engine.model.parts import RunnerPart
    from tandem.engine.model.runner import ModelInfo
    from tandem.engine.model.speculation.draft_loading import LoadedDraftModel
    from tandem.engine.model.speculation.eagle_loading import LoadedHead

_LONGEST, _SHORTEST = 4, 2


def propose_from_text(tokens: npt.NDArray[np.int32], num_drafts: int) -> list[int]:
    """Returns up to `num_drafts` tokens that may follow `tokens`: those after the longest earlier match of the newest tokens, and the
    latest of equally long ones."""
    for length in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        # Starts 0 .. len - length - 1: matches before the newest tokens themselves, with at least one token after them.
        ends = len(tokens) - length
        matches = tokens[:ends] == tokens[-length]
        for offset in range(1, length):
            matches &= tokens[offset : ends + offset] == tokens[offset - length]
        starts = np.flatnonzero(matches)
        if starts.size:
            # In overlapping repetition ("a a a a") few tokens follow the latest match. Prefer one that enough tokens follow.
            full = starts[starts + length + num_drafts <= len(tokens)]
            start = int(full[-1] if full.size else starts[0]) + length
            return [int(token) for token in tokens[start : start + num_drafts]]
    return []


class TextDrafter:
    """See engine.model.parts.Drafter."""

    guess_s = 0.0

    def propose(self, requests: RequestRows, wanted: Mapping[str, int]) -> Drafts:
        drafts: Drafts = {}
        for req_id, most in wanted.items():
            row = requests.row(req_id)
            drafts[req_id] = propose_from_text(requests.tokens[row, : int(requests.num_tokens[row])], most)
        return drafts

    def forget_requests(self) -> None:
        """It keeps nothing."""


log = logging.getLogger(__name__)


def capability(loading: ModelLoad) -> Capability | None:
    if not (loading.model.draft and loading.scheduler.num_speculative_tokens):
        return TextDrafts()
    return OwnHead(loading) if loading.model.draft == OWN_HEAD else NamedDrafts(loading)


class TextDrafts(Capability):
    """Costs nothing until a step asks for drafts, so that an engine with other settings can take the runner over."""

    drafter = TextDrafter()


class NamedDrafts(Capability):
    """Drafts from a draft model or an EAGLE head."""

    _observed: ObservedLayers | None = None
    _found: tuple[LoadedDraftModel | LoadedHead, LoadedModel, CachePlan] | None = None
    _reads_hidden = False

    def __init__(self, loading: ModelLoad) -> None:
        from tandem.engine.model.speculation.eagle_loading import layers_read  # it needs transformers

        model = loading.model
        self._loading = loading
        self._layers = layers_read(find_source(model.draft), loading.config)
        if self._layers and model.hidden_states_folder and model.hidden_states_layers:
            raise ConfigurationError(
                f"model.draft names {model.draft}, which reads other layers than model.hidden_states_layers: leave one of them out"
            )
        self.unchanged = bool(self._layers)
        self.general = "model.draft asks for hidden states" if self._layers else ""

    def change(self, model: PreTrainedModel) -> None:
        if self._layers:
            from tandem.engine.model.observed import ObservedLayers

            self._observed = ObservedLayers(self._loading.source.name, model, self._layers)

    def planned(self, loaded: LoadedModel, plan: CachePlan) -> None:
        from tandem.engine.model.speculation.draft_loading import check_plan

        if loaded.generates:
            check_plan(self._loading.source, plan)
            draft = self._load(loaded, plan)
            self.bytes_per_block = draft.bytes_per_block
            self._found = draft, loaded, plan

    def _load(self, loaded: LoadedModel, plan: CachePlan) -> LoadedDraftModel | LoadedHead:
        from tandem.engine.model.speculation.draft_loading import load_draft_model

        return load_draft_model(self._loading, plan, loaded, self._observed)

    def beside_cache(self, shape: ForwardShape, tokens: int) -> int:
        return self._found[0].beside_cache(shape, tokens) if self._found is not None else 0

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        from tandem.engine.model.speculation.eagle import EagleHead

        if self._found is None:
            return ()
        draft, loaded, plan = self._found
        made = draft.with_cache(num_blocks, plan.all_groups, loaded.vocab_size, self._loading.device, shape)
        log.info(
            "%s guesses for %s, with %d bytes of each block",
            draft.source.name,
            self._loading.source.name,
            draft.bytes_per_block,
        )
        self.drafter = made
        self._reads_hidden = isinstance(made, EagleHead)
        return (made,) if isinstance(made, EagleHead) else ()

    def complete(self, info: ModelInfo) -> ModelInfo:
        return msgspec.structs.replace(info, reads_hidden=self._reads_hidden)


class OwnHead(NamedDrafts):
    """Drafts from the head that the model's own checkpoint has."""

    general = f"model.draft is {OWN_HEAD}"

    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading
        self._layer: MtpModel | None = None
        self._model: PreTrainedModel | None = None

    def check(self, model: PreTrainedModel) -> None:
        from tandem.engine.model.speculation.mtp import load_layer  # it needs transformers

        self._layer = load_layer(self._loading.source, model)

    def change(self, model: PreTrainedModel) -> None:
        self._model = model

    def _load(self, loaded: LoadedModel, plan: CachePlan) -> LoadedHead:
        from tandem.engine.model.speculation.mtp import made_head

        if self._layer is None or self._model is None:
            raise InternalError("the model was loaded without its head")
        return made_head(self._loading.source, self._layer, self._model, plan)
