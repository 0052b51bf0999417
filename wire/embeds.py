"""Prompts of rows of numbers, each in place of one token's embedding (`prompt_embeds`).

In the prompt's token ids, one placeholder stands for each row. So the rows' content is named separately, as an
image's is: a run of `ROWS_TOGETHER` rows is one `MediaFeature`, whose identifier is a hash of these rows. Prefix
caches, their news and routers use it in a block's hash, so two prompts that begin with the same rows share their
blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from tandem.wire.images import MediaFeature

PLACEHOLDER = 0  # a token id that every vocabulary has
ROWS_TOGETHER = 16
# The bytes of one number, by type.
TYPES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# The most bytes of one prompt's rows: they travel to a node in one frame, whose size is bounded.
MOST_BYTES = 48 << 20


class PromptEmbeds(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rows, one after another without gaps, little-endian."""

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
        """Whether the data are complete rows, at least one, within MOST_BYTES."""
        return (
            self.dtype in TYPES
            and self.width > 0
            and 0 < len(self.data) <= MOST_BYTES
            and not len(self.data) % self.row_bytes
        )

    def features(self) -> list[MediaFeature]:
        """Returns one feature for each run of rows."""
        kind, run = f"{self.dtype}/{self.width}/".encode(), ROWS_TOGETHER * self.row_bytes
        return [
            MediaFeature(
                f"rows/{hashlib.sha256(kind + self.data[start : start + run]).hexdigest()}",
                start // self.row_bytes,
                min(ROWS_TOGETHER, self.count - start // self.row_bytes),
            )
            for start in range(0, len(self.data), run)
        ]
