"""The general forward pass: any transformers decoder, run as one sequence whose attention is ours."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.engine.model.attention.interface import attention_options, attention_through
from tandem.engine.model.attention.steps import AttentionStep, PagedAttention
from tandem.engine.model.batch import Batch
from tandem.engine.model.fused.find import take_rotary
from tandem.engine.model.runner import LayerHooks


class TransformersForward:
    """Runs the model with batch size 1 over all of the batch's tokens; only attention knows of requests."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention, num_layers: int) -> None:
        self._model = model
        self.attention = attention
        self.num_layers = num_layers
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        step = self.attention.begin(batch)
        return self.compute(batch.token_ids, batch.positions, step, hooks, batch.logit_rows)

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        hooks: LayerHooks | None = None,
        logit_rows: torch.Tensor | None = None,  # None: all
    ) -> torch.Tensor:
        picks = self._picks_rows and logit_rows is not None
        options: dict[str, Any] = {"logits_to_keep": logit_rows} if picks else {}
        with attention_through(_HookedStep(step, hooks).attention):
            output = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **options
            )
        logits: torch.Tensor = output.logits[0]
        return logits if picks or logit_rows is None else logits[logit_rows]


def peak_of_step(model: PreTrainedModel, tokens: int, rows: int, device: torch.device) -> int:
    """Bytes that a forward pass of so many tokens, `rows` of which want logits, takes on the device at its worst moment:
    measured, with attention that computes nothing."""

    def nothing(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    picks = "logits_to_keep" in inspect.signature(model.forward).parameters
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode(), attention_through(nothing):
        numbers = torch.arange(tokens, device=device)[None]
        options: dict[str, Any] = {"logits_to_keep": numbers[0, :rows]} if picks else {}
        model(input_ids=torch.zeros_like(numbers), position_ids=numbers, use_cache=False, **options)
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    # What torch keeps of it for later must not look taken when the cache is measured out.
    torch.cuda.empty_cache()
    return peak


class _HookedStep:
    def __init__(self, step: AttentionStep, hooks: LayerHooks | None) -> None:
        self._step = step
        self._hooks = hooks

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer: int = module.layer_idx
        if self._hooks is not None:
            self._hooks.wait_for_layer_load(layer)
        options = attention_options(module, query, kwargs)
        options["rotary"] = take_rotary(query, key)
        out = self._step.attend(layer, query[0], key[0], value[0], **options)
        if self._hooks is not None:
            self._hooks.save_kv_layer(layer)
        return out[None], None
