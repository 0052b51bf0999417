"""A vision tower without the rest of its model, as encoder nodes know it. `vision/` loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, cast

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.engine.config import ModelConfig
from tandem.engine.model.source import Progress
from tandem.engine.scheduling.output import EncoderInput
from tandem.wire.embeds import PromptEmbeds

TOWER = "tandem.engine.model.vision.alone"


@dataclasses.dataclass(frozen=True)
class TowerInfo:
    name: str
    content: str  # the digest of the whole model's content; only nodes with the same one may use the rows
    tokenizer: str
    max_model_len: int


class LoneTower(Protocol):
    @property
    def info(self) -> TowerInfo: ...

    def encode(self, inputs: Sequence[EncoderInput]) -> list[PromptEmbeds]:
        """Encodes parts of images and returns the rows of each. Raises the error of a part that cannot be encoded."""


class TowerLoader(Protocol):
    def load_tower(self, model: ModelConfig, max_model_len: int | None, progress: Progress | None = None) -> LoneTower:
        """Loads the tower. Raises a ConfigurationError for a model that reads no images."""


def tower_loader() -> TowerLoader:
    if module := find_wing(TOWER):
        return cast("TowerLoader", module)
    raise ConfigurationError("images are not served by this installation: set pools.encode to 0")
