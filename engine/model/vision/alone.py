"""A vision tower without the rest of its model: what an encoder node loads.

transformers loads the whole checkpoint, of which the language model is given back at once. So the node needs the memory of the whole
model for a moment, and that of the tower from then on.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import torch

from tandem.engine.cache.encoder_cache import EncoderInput
from tandem.engine.config import ModelConfig
from tandem.engine.model.checkpoint import choose_device, choose_dtype, context_length, read_config
from tandem.engine.model.content import content_of
from tandem.engine.model.general import load_model
from tandem.engine.model.loading import bind_threads
from tandem.engine.model.source import Progress, find_source
from tandem.engine.model.vision.tower import VisionTower, find_tower, rules_of
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.errors import ConfigurationError, TandemError

# What of a model no image goes through, by the names that transformers gives it.
_LANGUAGE = ("text_model", "language_model", "lm_head")


@dataclasses.dataclass(frozen=True)
class TowerInfo:
    name: str
    content: str  # the digest of the whole model's: rows go to nodes that have the same
    tokenizer: str
    max_model_len: int


class LoneTower:
    def __init__(self, info: TowerInfo, tower: VisionTower) -> None:
        self.info = info
        self._tower = tower

    def encode(self, inputs: Sequence[EncoderInput]) -> list[PromptEmbeds]:
        """For each part its rows. Raises what is wrong with one of them."""
        with torch.inference_mode():
            made = self._tower.encode(inputs)
        return [_in_bytes(rows) for rows in made]


def _in_bytes(rows: torch.Tensor | TandemError) -> PromptEmbeds:
    if isinstance(rows, TandemError):
        raise rows
    plain = rows.to("cpu").contiguous()
    data = plain.view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(str(plain.dtype).removeprefix("torch."), plain.shape[1], data)


def load_tower(model: ModelConfig, max_model_len: int | None, progress: Progress | None = None) -> LoneTower:
    """Raises ConfigurationError for a model that reads no images."""
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
    whole = load_model(source, config, dtype, device, tell, may_lack_head=True)
    tower = find_tower(source, whole, threads)
    if tower is None:
        raise ConfigurationError(f"{source.name} has no vision tower that can be loaded")
    for part in (whole, whole.base_model):
        _drop_language(part)
    gc.collect()
    tell("reading the weights to know them again", 0.0)
    content = content_of(source)
    info = TowerInfo(
        model.served_name or source.name,
        content.digest,
        content.tokenizer,
        context_length(config, max_model_len),
    )
    tell("ready", 1.0)
    return LoneTower(info, tower)


def _drop_language(module: Any) -> None:
    for name in _LANGUAGE:
        if isinstance(getattr(module, name, None), torch.nn.Module):
            setattr(module, name, None)
