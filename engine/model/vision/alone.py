"""Loads a vision tower without the rest of its model, for an encoder node.

The model's own class makes it, and the language model is removed before any weights are read. Transformers then reads only the tower's
weights, by their usual names, so the node needs memory only for the tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

from tandem.base.errors import ConfigurationError, TandemError
from tandem.engine.config import ModelConfig
from tandem.engine.model.checkpoint import choose_device, choose_dtype, read_config
from tandem.engine.model.content import content_of
from tandem.engine.model.context import context_length
from tandem.engine.model.general import load_model
from tandem.engine.model.kernel_linear import widen_left
from tandem.engine.model.loading import bind_threads
from tandem.engine.model.lone_tower import TowerInfo
from tandem.engine.model.source import Progress, find_source
from tandem.engine.model.vision.tower import VisionTower, find_tower, rules_of
from tandem.engine.scheduling.output import EncoderInput
from tandem.wire.embeds import PromptEmbeds

# Transformers' names of the parts of a model that images do not go through.
_LANGUAGE = ("text_model", "language_model", "lm_head")


class EncodingTower:
    """See engine.model.lone_tower.LoneTower."""

    def __init__(self, info: TowerInfo, tower: VisionTower) -> None:
        self.info = info
        self._tower = tower

    def encode(self, inputs: Sequence[EncoderInput]) -> list[PromptEmbeds]:
        with torch.inference_mode():
            made = self._tower.encode(inputs)
        return [_in_bytes(rows) for rows in made]


def _in_bytes(rows: torch.Tensor | TandemError) -> PromptEmbeds:
    if isinstance(rows, TandemError):
        raise rows
    plain = rows.to("cpu").contiguous()
    data = plain.view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(str(plain.dtype).removeprefix("torch."), plain.shape[1], data)


def load_tower(model: ModelConfig, max_model_len: int | None, progress: Progress | None = None) -> EncodingTower:
    """See engine.model.lone_tower.TowerLoader."""
    tell = progress or (lambda _what, _share: None)
    tell("reading the model's configuration", 0.0)
    source = find_source(model.path)
    device = choose_device(model.device)
    config = read_config(source)
    if rules_of(source, config) is None:
        raise ConfigurationError(
            f"{source.name} reads no images, so there is nothing for encoder nodes to do: set pools.encode to 0"
        )
    dtype = choose_dtype(model.dtype, source, config)
    threads = bind_threads(model.threads)
    tell("loading weights", 0.0)
    alone = load_model(source, config, dtype, device, tell, loader=_tower_class(config))
    widen_left(alone)
    tower = find_tower(source, alone, threads)
    if tower is None:
        raise ConfigurationError(f"{source.name} has no vision tower that can be loaded")
    tell("reading the weights to know them again", 0.0)
    content = content_of(source)
    info = TowerInfo(
        model.served_name or source.name, content.digest, content.tokenizer, context_length(config, max_model_len)
    )
    tell("ready", 1.0)
    return EncodingTower(info, tower)


def _tower_class(config: Any) -> type[PreTrainedModel]:
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]

    class TowerAlone(whole):  # type: ignore[misc,valid-type]  # one of transformers' classes
        _keys_to_ignore_on_load_unexpected = ("",)  # all keys of the checkpoint that are not the tower's

        def __init__(self, config: Any, *given: Any, **options: Any) -> None:
            super().__init__(config, *given, **options)
            for part in (self, self.base_model):
                for name in _LANGUAGE:
                    if isinstance(getattr(part, name, None), torch.nn.Module):
                        setattr(part, name, None)
            self.all_tied_weights_keys: dict[str, str] = {}

    # Transformers looks some things up by these names.
    TowerAlone.__name__, TowerAlone.__module__ = whole.__name__, whole.__module__
    return TowerAlone
