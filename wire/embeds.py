"""Prompts of rows of numbers, each of which stands in the place of one token's embedding (`prompt_embeds`).

In the prompt's token ids a placeholder stands for each. So its content is named beside them, as that of images is: a run of `ROWS_TOGETHER`
rows is one `MediaFeature`, whose identifier is a hash of these rows. Blocks are called by it in prefix caches, in news of them and by routers,
and two prompts that begin with the same rows share these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from tandem.wire.images import MediaFeature

PLACEHOLDER = 0  # a token id that every vocabulary has
ROWS_TOGETHER = 16
# Bytes of a number of each type.
TYPES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# What the rows of one prompt may take: they travel to a node in one frame, which is bounded.
MOST_BYTES = 48 << 20


class PromptEmbeds(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Row by row, little-endian, nothing between them."""

    dtype: str
    width: int
    data: bytes

    @property
    def count(self) -> int:
        return len(self.data) // self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.width * TYPES[self.dtype]

    @property
    def is_whole(self) -> bool:
        """Whether it is some rows and nothing more."""
        return (
            self.dtype in TYPES
            and self.width > 0
            and 0 < len(self.data) <= MOST_BYTES
            and not len(self.data) % self.row_bytes
        )

    def features(self) -> list[MediaFeature]:
        """What the rows are called, run by run."""
        kind, run = f"{self.dtype}/{self.width}/".encode(), ROWS_TOGETHER * self.row_bytes
        return [
            MediaFeature(
                f"rows/{hashlib.sha256(kind + self.data[start : start + run]).hexdigest()}",
                start // self.row_bytes,
                min(ROWS_TOGETHER, self.count - start // self.row_bytes),
            )
            for start in range(0, len(self.data), run)
        ]
