"""Encodes image files into rows that replace token embeddings, with the vision tower that transformers loaded with the model.

Transformers' own image processor, the one on Pillow, turns files into pixels. One image is cut into many parts, which different steps may
need, so the pixels of the last image are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tandem.base.errors import ConfigurationError, InvalidImage, TandemError, Unavailable
from tandem.engine.model.source import ModelSource
from tandem.engine.scheduling.output import EncoderInput
from tandem.wire.images import (
    GriddedImages,
    ImageRules,
    TiledImages,
    image_rules,
    open_image,
    processor_settings,
    upright_rgb,
)

# How many parts of images the tower encodes at once. Its attention is quadratic in a part, and its memory grows with their number.
PARTS_AT_ONCE = 8
_PROCESSORS = {
    "smolvlm": SmolVLMImageProcessorPil,
    "idefics3": Idefics3ImageProcessorPil,
    "qwen2_vl": Qwen2VLImageProcessorPil,
    "qwen2_5_vl": Qwen2VLImageProcessorPil,
    "qwen3_vl": Qwen2VLImageProcessorPil,
    "qwen3_vl_moe": Qwen2VLImageProcessorPil,
}


class VisionTower(Protocol):
    @property
    def rules(self) -> ImageRules: ...

    @property
    def width(self) -> int:
        """The numbers in a row: first those that replace a token's embedding, then as many again for each of the model's first layers that
        adds some to its output. In most models no layer does."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | TandemError]:
        """Returns for each input its rows, [its tokens, `width`] on the model's device, or the error why there are none."""


def rules_of(source: ModelSource, config: Any) -> ImageRules | None:
    """How images are prepared and cut for this model; None if the model reads no images."""
    if source.gguf_file is not None or config.model_type not in _PROCESSORS:
        return None
    return image_rules(source.read_json("config.json"), processor_settings(source.read_json))


def find_tower(source: ModelSource, model: PreTrainedModel, threads: int) -> VisionTower | None:
    """The model's tower; None without one. On a CPU it encodes with `threads` threads. Raises a ConfigurationError if the folder's image
    settings do not fit the model."""
    rules = rules_of(source, model.config)
    if isinstance(rules, TiledImages):
        return TiledTower(source, model, rules, threads)
    return GriddedTower(source, model, rules, threads) if rules is not None else None


def loader_of(config: Any) -> Any:
    """Transformers' class that loads the model together with its tower; None if the model has no tower."""
    return AutoModelForImageTextToText if config.model_type in _PROCESSORS else None


class _ProcessedImages:
    """The common part of towers. A file is turned into pixels once for all its parts in a step, and a file that cannot be read fails only
    its own parts."""

    def __init__(self, source: ModelSource, model: PreTrainedModel, rules: ImageRules, threads: int) -> None:
        self.rules = rules
        self.width = int(model.config.get_text_config().hidden_size)
        self._threads = threads
        self._name = source.name
        self._model: Any = model.base_model
        self._processor: Any = _PROCESSORS[model.config.model_type].from_pretrained(source.folder)
        self._last: tuple[bytes, Any] | None = None
        if model.config.image_token_id != rules.token_id:
            raise self._refusal("its placeholder token is not the one of config.json")

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"{self._name} cannot be served: {why}")

    def _rows(self, pixels: Any, wanted: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Encodes some parts of one image: [its tokens, `width`] for each part."""
        raise NotImplementedError

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | TandemError]:
        # Torch may have only one thread for the rest of the step, whose kernels have their own threads.
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._encoded(inputs)
        finally:
            torch.set_num_threads(before)

    def _encoded(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | TandemError]:
        found: dict[int, torch.Tensor | TandemError] = {}
        of_image: dict[bytes, list[int]] = defaultdict(list)
        for place, one in enumerate(inputs):
            of_image[one.file].append(place)
        for file, places in of_image.items():
            try:
                pixels = self._pixels(file)
                for begin in range(0, len(places), PARTS_AT_ONCE):
                    some = places[begin : begin + PARTS_AT_ONCE]
                    wanted = [inputs[place] for place in some]
                    found |= zip(some, map(_expected, self._rows(pixels, wanted), wanted), strict=True)
            except TandemError as error:
                found |= dict.fromkeys(places, error)
            except MemoryError as error:
                found |= dict.fromkeys(places, _passing(error))
            # Pillow and the processor may raise these for a file that a router could read.
            except (OSError, ValueError, SyntaxError) as error:
                # Pillow's own errors about a file have no number; those of the machine do.
                if isinstance(error, OSError) and error.errno is not None:
                    found |= dict.fromkeys(places, _passing(error))
                    continue
                refusal = InvalidImage(f"an image cannot be read: {type(error).__name__}: {error}")
                found |= dict.fromkeys(places, refusal)
        return [found[place] for place in range(len(inputs))]

    def _pixels(self, file: bytes) -> Any:
        if self._last is None or self._last[0] != file:
            self._last = file, self._processor(images=[upright_rgb(open_image(file))], return_tensors="pt")
        return self._last[1]


def _passing(error: Exception) -> Unavailable:
    """The image is not at fault: the same one may be encoded the next time."""
    return Unavailable(f"an image could not be encoded just now: {type(error).__name__}: {error}")


def _expected(rows: torch.Tensor, wanted: EncoderInput) -> torch.Tensor:
    if rows.shape[0] != wanted.length:
        raise InvalidImage(
            f"a part of an image has {rows.shape[0]} tokens here, and {wanted.length} where its prompt was made: the image processor's "
            "settings differ"
        )
    return rows


class TiledTower(_ProcessedImages):
    """The tower of Idefics3 and SmolVLM."""

    def __init__(self, source: ModelSource, model: PreTrainedModel, rules: TiledImages, threads: int) -> None:
        super().__init__(source, model, rules, threads)
        # The model's own attention goes through the paged cache, which has no images.
        self._model.vision_model.set_attn_implementation("sdpa")
        tile = torch.ones(1, 1, 3, rules.tile, rules.tile)
        with torch.inference_mode():
            (rows,) = self._rows({"pixel_values": tile}, [EncoderInput("", b"", 0, rules.tokens)])
        if rows.shape[0] != rules.tokens:
            raise self._refusal(f"its tower makes {rows.shape[0]} tokens of a tile, and its folder says {rules.tokens}")

    def _rows(self, pixels: Any, wanted: Sequence[EncoderInput]) -> list[torch.Tensor]:
        tiles: torch.Tensor = pixels["pixel_values"]
        parts = [one.part for one in wanted]
        if max(parts) >= tiles.shape[1]:
            raise InvalidImage(f"an image has {tiles.shape[1]} tiles here, and more where its prompt was made")
        tiles = tiles[:, parts].to(self._model.device)
        rows = torch.cat(list(self._model.get_image_features(pixel_values=tiles).pooler_output))
        # Transformers leaves out tiles that are all zeros.
        if rows.shape[0] % len(parts):
            raise InvalidImage("a part of an image is all of the one colour that stands for no image")
        return list(rows.reshape(len(parts), -1, rows.shape[-1]))


class GriddedTower(_ProcessedImages):
    """The tower of Qwen-VL. Qwen3-VL's also makes rows that the language model's first layers add (DeepStack)."""

    def __init__(self, source: ModelSource, model: PreTrainedModel, rules: GriddedImages, threads: int) -> None:
        super().__init__(source, model, rules, threads)
        self._model.visual.set_attn_implementation("sdpa")
        vision = model.config.vision_config
        self.width *= 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
        if vision.patch_size * vision.spatial_merge_size != rules.side:
            raise self._refusal(
                f"its tower makes a token of {vision.patch_size * vision.spatial_merge_size} pixels a side, and its folder says {rules.side}"
            )

    def _rows(self, pixels: Any, wanted: Sequence[EncoderInput]) -> list[torch.Tensor]:
        grid: torch.Tensor = pixels["image_grid_thw"]
        columns = int(grid[0, 2]) // self._model.config.vision_config.spatial_merge_size
        if any(one.part or one.columns != columns for one in wanted):
            raise InvalidImage(
                "an image has another shape here than where its prompt was made: the image processor's settings differ"
            )
        pixel_values: torch.Tensor = pixels["pixel_values"].to(self._model.device)
        made = self._model.get_image_features(pixel_values, grid.to(self._model.device))
        deeper = [of_layer[0] for of_layer in getattr(made, "deepstack_features", ())]
        rows = torch.cat([made.pooler_output[0], *deeper], dim=-1)
        return [rows for _ in wanted]


def linear_weights_of_tower(model: PreTrainedModel) -> int:
    """The number of weights in linear layers that only images go through."""
    if model.config.model_type not in _PROCESSORS:
        return 0
    base: Any = model.base_model
    towers = [getattr(base, name, None) for name in ("vision_model", "connector", "visual")]
    return sum(
        layer.weight.numel()
        for tower in towers
        if tower is not None
        for layer in tower.modules()
        if isinstance(layer, torch.nn.Linear)
    )
