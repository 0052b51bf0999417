"""From image files to rows of numbers in place of token embeddings, by the vision tower that transformers loaded with the model.

Files are made pixels by transformers' own processor, the one on Pillow. One image is cut into many parts, which may be wanted in
different steps, so the pixels of the last image are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tandem.engine.cache.encoder_cache import EncoderInput
from tandem.engine.model.source import ModelSource
from tandem.wire.errors import ConfigurationError, InvalidImage, TandemError
from tandem.wire.images import ImageRules, image_rules, open_image, processor_settings, upright_rgb

# Parts of images that go through the tower at once: its attention is quadratic in a part, and its memory grows with their number.
PARTS_AT_ONCE = 8
_PROCESSORS = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}


class VisionTower(Protocol):
    @property
    def rules(self) -> ImageRules: ...

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | TandemError]:
        """For each, [its tokens, hidden size] on the model's device, or why there is none."""
        ...


def rules_of(source: ModelSource, config: Any) -> ImageRules | None:
    """None: the model reads no images."""
    if source.gguf_file is not None or config.model_type not in _PROCESSORS:
        return None
    return image_rules(source.read_json("config.json"), processor_settings(source.read_json))


def find_tower(source: ModelSource, model: PreTrainedModel) -> VisionTower | None:
    """Raises ConfigurationError where what the folder says of images does not fit the model."""
    rules = rules_of(source, model.config)
    return TiledTower(source, model, rules) if rules is not None else None


def loader_of(config: Any) -> Any:
    """The class of transformers that loads the model together with its tower; None where there is none to be loaded."""
    return AutoModelForImageTextToText if config.model_type in _PROCESSORS else None


class TiledTower:
    """Idefics3's and SmolVLM's."""

    def __init__(self, source: ModelSource, model: PreTrainedModel, rules: ImageRules) -> None:
        self._model: Any = model.base_model
        # The model's own attention goes through the paged cache, which an image is no part of.
        self._model.vision_model.set_attn_implementation("sdpa")
        self._processor: Any = _PROCESSORS[model.config.model_type].from_pretrained(source.folder)
        self._last: tuple[bytes, torch.Tensor] | None = None
        self.rules = rules
        if model.config.image_token_id != rules.token_id:
            raise ConfigurationError(
                f"{source.name} cannot be served: its placeholder token is not the one of config.json"
            )
        side = torch.zeros(1, 1, 3, rules.tile, rules.tile)
        side[0, 0, 0, 0, 0] = 1.0  # an image of zeros is taken for padding
        with torch.inference_mode():
            rows = self._rows(side)
        if rows.shape[:2] != (1, rules.tokens):
            raise ConfigurationError(
                f"{source.name} cannot be served: its tower makes {rows.shape[1]} tokens of a tile, and its folder says {rules.tokens}"
            )

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | TandemError]:
        found: list[torch.Tensor | TandemError | None] = [None] * len(inputs)
        of_image: dict[bytes, list[int]] = defaultdict(list)
        for place, one in enumerate(inputs):
            of_image[one.file].append(place)
        for file, places in of_image.items():
            try:
                tiles = self._pixels(file)
                parts = [inputs[place].part for place in places]
                if max(parts) >= tiles.shape[1]:
                    raise InvalidImage(
                        f"an image has {tiles.shape[1]} parts here and {max(parts) + 1} or more where its prompt was made: the image "
                        "processor's settings differ"
                    )
                for begin in range(0, len(parts), PARTS_AT_ONCE):
                    some = slice(begin, begin + PARTS_AT_ONCE)
                    for place, rows in zip(places[some], self._rows(tiles[:, parts[some]]), strict=True):
                        found[place] = rows
            except TandemError as error:
                for place in places:
                    found[place] = error
            # Whatever Pillow and the processor raise for a file that a router could read.
            except (OSError, ValueError, SyntaxError, RuntimeError, MemoryError) as error:
                refusal = InvalidImage(f"an image cannot be read: {type(error).__name__}: {error}")
                for place in places:
                    found[place] = refusal
        return [one if one is not None else InvalidImage("an image was not read") for one in found]

    def _pixels(self, file: bytes) -> torch.Tensor:
        """[1, tiles, 3, side, side]"""
        if self._last is not None and self._last[0] == file:
            return self._last[1]
        image = upright_rgb(open_image(file))
        pixels: torch.Tensor = self._processor(images=[image], return_tensors="pt")["pixel_values"]
        self._last = (file, pixels)
        return pixels

    def _rows(self, tiles: torch.Tensor) -> torch.Tensor:
        """[tiles, tokens, hidden size]"""
        count = tiles.shape[1]
        features = self._model.get_image_features(pixel_values=tiles.to(self._model.device)).pooler_output
        rows = torch.cat(list(features))
        if rows.shape[0] % count or rows.shape[0] == 0:
            raise InvalidImage("a part of an image is all of the one colour that stands for no image")
        return rows.reshape(count, -1, rows.shape[-1])
