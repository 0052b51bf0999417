"""The general forward pass: any transformers decoder, run as one sequence whose attention is ours, and whose states are each request's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.engine.model.attention.interface import (
    AttentionStep,
    PagedAttention,
    attention_options,
    attention_through,
)
from tandem.engine.model.batch import Batch
from tandem.engine.model.fused.rotary import take_rotary
from tandem.engine.model.recurrent.layout import LayerStates
from tandem.engine.model.recurrent.mixers import (
    Mixers,
    OwnCache,
    RecurrentStep,
    StepCache,
    attending_layer,
    cache_parameter,
    mixing_through,
)
from tandem.engine.model.runner import LayerHooks
from tandem.wire.errors import InternalError


class TransformersForward:
    """Runs the model with batch size 1 over all of the batch's tokens; only attention and mixers know of requests."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: PagedAttention,
        num_layers: int,
        mixers: Mixers | None = None,
        states: LayerStates | None = None,
    ) -> None:
        self._model = model
        self.attention = attention
        self.num_layers = num_layers
        self._mixers, self._states = mixers, states
        parameters = inspect.signature(model.forward).parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_parameter(parameters)

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        step = self.attention.begin(batch)
        mixing = None
        if self._mixers is not None and self._states is not None:
            mixing = RecurrentStep(self._mixers, self._states, batch, hooks)
        return self.compute(batch.token_ids, batch.positions, step, hooks, batch.logit_rows, mixing)

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        hooks: LayerHooks | None = None,
        logit_rows: torch.Tensor | None = None,  # None: all
        mixing: RecurrentStep | None = None,
        cache: OwnCache | StepCache | None = None,
    ) -> torch.Tensor:
        """With `mixing`, its cache stands where the model expects one; without, `cache` does."""
        picks = self._picks_rows and logit_rows is not None
        options: dict[str, Any] = {"logits_to_keep": logit_rows} if picks else {}
        if self._takes_positions:
            options["position_ids"] = positions[None]
        if mixing is not None:
            cache = mixing.cache
        if cache is not None and self._cache_name is not None:
            options[self._cache_name] = cache
        with attention_through(_HookedStep(step, hooks, cache).attention), mixing_through(mixing):
            output = self._model(input_ids=token_ids[None], use_cache=False, **options)
        logits: torch.Tensor = output.logits[0]
        return logits if picks or logit_rows is None else logits[logit_rows]


def peak_of_step(model: PreTrainedModel, tokens: int, rows: int, device: torch.device) -> int:
    """Bytes that a forward pass of so many tokens, `rows` of which want logits, takes on the device at its worst moment:
    measured, with attention that computes nothing."""

    def nothing(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    parameters = inspect.signature(model.forward).parameters
    picks = "logits_to_keep" in parameters
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode(), attention_through(nothing):
        numbers = torch.arange(tokens, device=device)[None]
        options: dict[str, Any] = {"logits_to_keep": numbers[0, :rows]} if picks else {}
        if "position_ids" in parameters:
            options["position_ids"] = numbers
        model(input_ids=torch.zeros_like(numbers), use_cache=False, **options)
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    # What torch keeps of it for later must not look taken when the cache is measured out.
    torch.cuda.empty_cache()
    return peak


class _HookedStep:
    def __init__(
        self, step: AttentionStep, hooks: LayerHooks | None, cache: OwnCache | StepCache | None = None
    ) -> None:
        self._step = step
        self._hooks = hooks
        self._cache = cache

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = attending_layer(module, self._cache)
        if layer is None:
            raise InternalError("an attention module does not say which layer it is")
        if self._hooks is not None:
            self._hooks.wait_for_layer_load(layer)
        options = attention_options(module, query, kwargs)
        options["rotary"] = take_rotary(query, key)
        out = self._step.attend(layer, query[0], key[0], value[0], **options)
        if self._hooks is not None:
            self._hooks.save_kv_layer(layer)
        return out[None], None
