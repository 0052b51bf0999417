"""The images of one request, and their places in its prompt.

A chat template writes one placeholder per image. How many tokens stand for an image, and what is between
them, depends on its size. This module writes them as the model's own processor would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.api.images.files import ImageFile, read_file
from tandem.api.openai.chat_request import ImagePart
from tandem.api.settings import RequestLimits
from tandem.api.text.tokenizer import Tokenizer, read_json
from tandem.base.errors import ConfigurationError, InvalidImage, InvalidRequest
from tandem.base.shares import OneAtATime
from tandem.wire.images import (
    ImageRules,
    MediaFeature,
    digest_of_image,
    image_rules,
    media_features,
    processor_settings,
)

# How many files are decoded at once, of one key one: each takes memory for its pixels, and a core.
_AT_ONCE = 2
# The most bytes of one request's images: they are sent to a node in one frame, whose size is bounded.
_MOST_BYTES = 48 << 20


class ExpandedImages:
    """The images of one request."""

    def __init__(self, rules: ImageRules, placeholder: str) -> None:
        self._rules = rules
        self._placeholder = placeholder
        self._files: list[ImageFile] = []
        self._digests: list[str] = []

    def add(self, file: ImageFile, digest: str) -> None:
        self._files.append(file)
        self._digests.append(digest)

    @property
    def files(self) -> list[bytes]:
        return [file.data for file in self._files]

    def expanded(self, text: str) -> str:
        pieces = text.split(self._placeholder)
        if len(pieces) != len(self._files) + 1:
            raise InvalidRequest(
                f"messages: the model's chat template has a place for {len(pieces) - 1} of the {len(self._files)} images",
                "messages",
            )
        written = [pieces[0]]
        for file, after in zip(self._files, pieces[1:], strict=True):
            written += self._rules.written(self._placeholder, file.width, file.height), after
        return "".join(written)

    def features(self, token_ids: Sequence[int]) -> list[MediaFeature]:
        parts = [self._rules.parts(file.width, file.height) for file in self._files]
        found = media_features(token_ids, self._rules.token_id, parts, self._digests)
        if found is None:
            raise InvalidImage("messages: the prompt has other placeholders than those of its images", "messages")
        return found


class FileImageReader:
    def __init__(self, rules: ImageRules, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._rules = rules
        self._limits = limits
        # Threads of its own: a file whose client has gone is still decoded to its end, and must still count.
        self._decoders = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="images")
        self._of_tenant = OneAtATime()
        placeholder = tokenizer.text_of(rules.token_id)
        if placeholder is None or tokenizer.token_id(placeholder) != rules.token_id:
            raise ConfigurationError(f"the tokenizer has no placeholder for images: token {rules.token_id} is none")
        self._placeholder = placeholder

    async def read(self, parts: Sequence[ImagePart], tenant: str) -> ExpandedImages:
        if len(parts) > self._limits.images_per_request:
            raise InvalidRequest(
                f"messages: at most {self._limits.images_per_request} images in one request "
                f"(router.limits.images_per_request), not {len(parts)}",
                "messages",
            )
        found = ExpandedImages(self._rules, self._placeholder)
        for part in parts:
            async with self._of_tenant.turn(tenant):
                found.add(*await asyncio.get_running_loop().run_in_executor(self._decoders, self._read, part))
            if sum(map(len, found.files)) > _MOST_BYTES:
                raise InvalidImage(
                    f"{part.where}: the images have more than the {_MOST_BYTES} bytes together that nodes take",
                    part.where,
                )
        return found

    def _read(self, part: ImagePart) -> tuple[ImageFile, str]:
        file = read_file(part, self._limits)
        return file, digest_of_image(file.data)


def image_reader(folder: str, tokenizer: Tokenizer, limits: RequestLimits) -> FileImageReader | None:
    """Makes a reader for the model in this folder. None when the model reads no images, or reads them in
    an unknown way."""
    path = Path(folder)
    rules = image_rules(read_json(path / "config.json"), processor_settings(lambda name: read_json(path / name)))
    return FileImageReader(rules, tokenizer, limits) if rules is not None else None
