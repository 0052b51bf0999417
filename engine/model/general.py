"""The general path's model: loaded by transformers, its attention replaced by ours, and probed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.model.attention.interface import PAGED
from engine.model.checkpoint import gguf_options, translated_errors
from engine.model.leftovers import refuse_gguf_leftovers, refuse_leftovers
from engine.model.source import Progress, Source
from wire.errors import ConfigurationError


def load_model(
    source: Source, dtype: torch.dtype, device: torch.device, progress: Progress
) -> PreTrainedModel:
    """Weights are mapped from their files and copied once, shard by shard, straight into place."""
    with translated_errors(source), _reported(progress):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=dtype,
            attn_implementation=PAGED,
            device_map={"": str(device)} if device.type != "cpu" else None,
            trust_remote_code=False,
            use_safetensors=None if source.gguf_file else True,
            output_loading_info=True,
            **gguf_options(source),
        )
    absent = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if absent:
        some = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        raise ConfigurationError(f"{source.name} cannot be served: its checkpoint lacks {some}")
    refuse_leftovers(source.name, report["unexpected_keys"], model.config)
    if source.gguf_file is not None:
        refuse_gguf_leftovers(source, model)
    model.eval()
    model.requires_grad_(False)
    return model


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Transformers counts weights as it loads them: pass that on, and keep its bar off the terminal."""
    previous = transformers_logging.set_tqdm_hook(
        lambda _factory, args, kwargs: _Bar(progress, *args, **kwargs)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Bar:
    """As much of a tqdm bar as transformers uses."""

    def __init__(
        self,
        progress: Progress,
        items: Any = None,
        *,
        desc: str = "loading",
        total: int | None = None,
        **_: Any,
    ) -> None:
        self._progress = progress
        self._what = desc.lower().rstrip(". ")
        self._items = items
        self._total = total or (len(items) if hasattr(items, "__len__") else 0)
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._total:
            self._progress(self._what, min(1.0, self._done / self._total))
