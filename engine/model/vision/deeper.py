"""Passes the rows to the model that its first layers add to images' rows (Qwen3-VL's DeepStack). Its own code takes them from its own
vision tower."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.engine.model.runner import Around, Batch


def deeper_rows(model: PreTrainedModel) -> Around | None:
    """What happens around a forward pass of this model; None if no layer adds to images' rows."""
    language: Any = getattr(model.base_model, "language_model", None)
    if language is None or "deepstack_visual_embeds" not in inspect.signature(language.forward).parameters:
        return None
    hidden = int(model.config.get_text_config().hidden_size)

    @contextmanager
    def telling(batch: Batch) -> Iterator[None]:
        states, places = batch.image_states, batch.image_rows
        if states is None or places is None or states.shape[1] == hidden:
            yield
            return
        _, *deeper = torch.split(states, hidden, dim=1)
        mask = torch.zeros(1, batch.num_tokens, dtype=torch.bool, device=states.device)
        mask[0, places] = True
        # The model takes these rows in the order of its tokens.
        order = places.argsort()
        given = {"visual_pos_masks": mask, "deepstack_visual_embeds": [each[order] for each in deeper]}

        def tell(_module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return inputs, options | given

        hook = language.register_forward_pre_hook(tell, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    return telling
