"""What routers and nodes must agree on about images: how many placeholder tokens one takes, and where in a prompt
they stand.

A router makes the prompt, with a run of placeholder tokens for each part of an image that the model's vision tower
encodes by itself, and sends the images' files with it. A node decodes a file only to encode it: images whose KV is
cached stay files.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tandem.base.errors import ConfigurationError

if TYPE_CHECKING:
    from PIL import Image

# Pillow's names. Its readers of other formats have met fewer hostile files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# transformers scales no side beyond this.
_LONGEST_SIDE = 4096


class MediaFeature(msgspec.Struct, frozen=True, array_like=True):
    """A run of placeholder tokens in a prompt, which stands for a part of an image."""

    identifier: str  # derived from the part's content
    offset: int
    length: int
    image: int = 0  # which of the request's images
    part: int = 0  # which part of that image
    # Tokens per row, if positions count rows and columns; 0: they count on one by one, as a text's.
    columns: int = 0


class ImagePlaces(NamedTuple):
    """The placeholders of one part of an image."""

    length: int
    columns: int = 0  # see MediaFeature


class TiledImages(msgspec.Struct, frozen=True, tag="tiled"):
    """Idefics3 and SmolVLM: an image is scaled and cut into tiles of one size. The last tile is a small copy of it
    all."""

    tile: int  # pixels of a side
    longest: int  # an image's longer side is scaled to this many pixels before it is cut
    is_cut: bool  # False: one tile, the whole image
    tokens: int  # per tile
    token_id: int  # the placeholder

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles; (0, 0) if the whole image is one tile."""
        if not self.is_cut:
            return 0, 0
        width, height = self._scaled(width, height)
        wide, high = self._tiles(width), self._tiles(height)
        if width >= height:
            high = self._tiles(int(wide * self.tile / (width / height)))
        else:
            wide = self._tiles(int(high * self.tile * (width / height)))
        return (high, wide) if high > 1 or wide > 1 else (0, 0)

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Returns the scaled width and height. The shorter side grows to an even number."""
        ratio = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / ratio)
            height += height % 2
        else:
            width, height = int(self.longest * ratio), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _LONGEST_SIDE:
            width, height = _LONGEST_SIDE, int(_LONGEST_SIDE / ratio)
        elif height > width and height > _LONGEST_SIDE:
            width, height = int(_LONGEST_SIDE * ratio), _LONGEST_SIDE
        return max(width, 1), max(height, 1)

    def _tiles(self, side: int) -> int:
        return math.ceil(side / self.tile)

    def parts(self, width: int, height: int) -> list[ImagePlaces]:
        """Returns the placeholders of each tile, in the prompt's order."""
        rows, columns = self.grid(width, height)
        return [ImagePlaces(self.tokens)] * (rows * columns + 1)

    def written(self, placeholder: str, width: int, height: int) -> str:
        """Returns the text that replaces the one placeholder of an image in a chat template's output, as the model's
        own processor writes it."""
        around, run = "<fake_token_around_image>", placeholder * self.tokens
        rows, columns = self.grid(width, height)
        tiles = "".join(
            "".join(f"{around}<row_{row}_col_{column}>{run}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return f"{tiles}\n{around}<global-img>{run}{around}" if tiles else f"{around}<global-img>{run}{around}"


class GriddedImages(msgspec.Struct, frozen=True, tag="gridded"):
    """Qwen-VL: an image keeps its shape, and is scaled to a number of pixels between two bounds. It is one part, whose
    tokens have positions by row and column."""

    side: int  # pixels of a token's side
    fewest: int  # the fewest pixels of an image
    most: int
    token_id: int  # the placeholder

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens."""
        side = self.side
        rows, columns = round(height / side), round(width / side)
        area = rows * columns * side * side
        if area > self.most:
            shrunk = math.sqrt(height * width / self.most)
            return max(1, math.floor(height / shrunk / side)), max(1, math.floor(width / shrunk / side))
        if area < self.fewest:
            grown = math.sqrt(self.fewest / (height * width))
            return math.ceil(height * grown / side), math.ceil(width * grown / side)
        return rows, columns

    def parts(self, width: int, height: int) -> list[ImagePlaces]:
        rows, columns = self.grid(width, height)
        return [ImagePlaces(rows * columns, columns)]

    def written(self, placeholder: str, width: int, height: int) -> str:
        return placeholder * self.parts(width, height)[0].length


ImageRules = TiledImages | GriddedImages


def image_rules(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageRules | None:
    """Returns the rules from a model's config.json and its image processor's settings. None: Tandem reads no images for
    such a model. Raises ConfigurationError."""
    kind = config.get("model_type")
    if kind in ("smolvlm", "idefics3"):
        rules: ImageRules = _tiled(kind, config, processor)
    elif kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        rules = _gridded(config, processor)
    else:
        return None
    if processor.get("do_resize") is False:
        raise ConfigurationError(f"a model of type {kind} cannot be served: its images are not scaled")
    return rules


def _gridded(config: Mapping[str, Any], processor: Mapping[str, Any]) -> GriddedImages:
    size = processor.get("size") or {}
    fewest, most = (
        int(processor.get(old) or size.get(new) or usual)
        for old, new, usual in (
            ("min_pixels", "shortest_edge", 56 * 56),
            ("max_pixels", "longest_edge", 28 * 28 * 1280),
        )
    )
    side = int(processor.get("patch_size") or 14) * int(processor.get("merge_size") or 2)
    return GriddedImages(side, fewest, most, int(config.get("image_token_id") or 151655))


def _tiled(kind: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> TiledImages:
    vision = config.get("vision_config") or {}
    tile = _side(processor.get("max_image_size"), 364)
    per_token = int(vision.get("patch_size") or 32) * int(config.get("scale_factor") or 2)
    if tile % per_token:
        raise ConfigurationError(
            f"a model of type {kind} cannot be served: tiles of {tile} pixels are no whole number of tokens of {per_token}"
        )
    return TiledImages(
        tile=tile,
        longest=_side(processor.get("size"), 4 * 364),
        is_cut=processor.get("do_image_splitting") is not False,
        tokens=(tile // per_token) ** 2,
        token_id=int(config.get("image_token_id") or 128257),
    )


def _side(size: Any, usual: int) -> int:
    return int(size.get("longest_edge") or usual) if isinstance(size, Mapping) else usual


def processor_settings(read_json: Any) -> dict[str, Any]:
    """Returns the image processor's settings in a model's folder. `read_json` returns an optional file's content by
    name, or an empty mapping."""
    settings: dict[str, Any] = read_json("preprocessor_config.json")
    if not settings:
        settings = read_json("processor_config.json").get("image_processor") or {}
    return settings


def media_features(
    token_ids: Sequence[int], token_id: int, parts: Sequence[Sequence[ImagePlaces]], digests: Sequence[str]
) -> list[MediaFeature] | None:
    """Returns the runs of `token_id` in the prompt; None if they do not match the images' parts."""
    features: list[MediaFeature] = []
    wanted = [(image, part, *places) for image, of in enumerate(parts) for part, places in enumerate(of)]
    at, end = 0, len(token_ids)
    for image, part, length, columns in wanted:
        while at < end and token_ids[at] != token_id:
            at += 1
        if token_ids[at : at + length] != [token_id] * length:
            return None
        features.append(MediaFeature(f"{digests[image]}/{part}", at, length, image, part, columns))
        at += length
    return None if token_id in token_ids[at:] else features


def rows_name(identifier: str, salt: str | None) -> str:
    """Returns the name under which the rows of a part are cached. It contains the cache salt, so no tenant can find out by
    timing whether another has sent the same image. The salt itself cannot be read from it."""
    if salt is None:
        return identifier
    return f"{identifier}@{hashlib.blake2b(salt.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def salted(media: Sequence[MediaFeature], salt: str | None) -> Sequence[MediaFeature]:
    """Returns the parts with `rows_name` as their identifiers."""
    if salt is None:
        return media
    return [msgspec.structs.replace(part, identifier=rows_name(part.identifier, salt)) for part in media]


def digest_of_image(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()[:40]


def open_image(file: bytes) -> Image.Image:
    """Opens an image, or an animation's first picture. Raises Pillow's errors; some of them come only when its
    pixels are read."""
    # Imported here, because most models read no images.
    from PIL import Image

    return Image.open(io.BytesIO(file), formats=FORMATS)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Returns the image as transformers reads it for a chat: turned upright by its camera's mark, and opaque."""
    from PIL import ImageOps

    turned: Image.Image = ImageOps.exif_transpose(image)
    return turned.convert("RGB")
