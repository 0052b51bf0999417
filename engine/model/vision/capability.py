"""Images, for a model with a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.plain_config import PlainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.loaded import ForwardShape
    from tandem.engine.model.parts import RunnerPart
    from tandem.engine.model.runner import Around, ModelInfo
    from tandem.engine.model.vision.tower import VisionTower


def capability(loading: ModelLoad) -> Capability | None:
    if isinstance(loading.config, PlainConfig):  # of a model without a tower
        return None
    from tandem.engine.model.vision.tower import rules_of  # it needs transformers

    source = loading.source
    if rules_of(source, loading.config) is None:
        return None
    if loading.shard is not None:
        raise ConfigurationError(
            f"{source.name} cannot be served on several ranks: it reads images, which one rank alone would see. Set "
            "pools.<pool>.tensor_parallel to 1"
        )
    return ReadImages(loading)


class ReadImages(Capability):
    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading
        self._tower: VisionTower | None = None

    @property
    def loader(self) -> Any:
        from tandem.engine.model.vision.tower import loader_of

        return loader_of(self._loading.config)

    def weights_aside(self, model: PreTrainedModel) -> int:
        from tandem.engine.model.vision.tower import linear_weights_of_tower

        return linear_weights_of_tower(model)

    def change(self, model: PreTrainedModel) -> None:
        from tandem.engine.model.vision.tower import find_tower

        self._tower = find_tower(self._loading.source, model, self._loading.threads)

    def around(self, model: PreTrainedModel) -> Around | None:
        from tandem.engine.model.vision.rows import deeper_rows

        return deeper_rows(model)

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        from tandem.engine.model.vision.rows import ImageRows

        return (ImageRows(self._tower, self._loading.device),) if self._tower is not None else ()

    def complete(self, info: ModelInfo) -> ModelInfo:
        if self._tower is None:
            return info
        return msgspec.structs.replace(info, images=self._tower.rules, image_row_size=self._tower.width)
