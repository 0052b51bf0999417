"""The general forward pass: any transformers decoder, run as one sequence whose attention is ours."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.model.attention.gathered import GatheredCache, PagedStep
from engine.model.attention.interface import attention_through
from engine.model.attention.layers import CachePlan
from engine.model.batch import Batch
from engine.model.probe import attention_options
from engine.model.runner import LayerHooks


class TransformersForward:
    """Runs the model with batch size 1 over all of the batch's tokens; only attention knows of requests."""

    def __init__(self, model: PreTrainedModel, kv_cache: torch.Tensor, plan: CachePlan) -> None:
        self._model = model
        self._cache = GatheredCache(kv_cache, plan)
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        step = _HookedStep(PagedStep(self._cache, batch), hooks)
        options: dict[str, Any] = {"logits_to_keep": batch.logit_rows} if self._picks_rows else {}
        with attention_through(step.attention):
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **options,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._picks_rows else logits[batch.logit_rows]


class _HookedStep:
    def __init__(self, step: PagedStep, hooks: LayerHooks | None) -> None:
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
        out = self._step.attend(layer, query[0], key[0], value[0], **options)
        if self._hooks is not None:
            self._hooks.save_kv_layer(layer)
        return out[None], None
