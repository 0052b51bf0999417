"""What a node that reads prompts asks of an encoder node, and what it gets: the rows that stand in the place of an image's placeholders.

    Encode ──▶ the encoder node looks into its cache, or runs its vision tower
    ◀── EncodedRows, one or several for each part, or EncodingRefused

Rows are a function of the image's content and of the model's. Both are named in either direction, and the receiver sums the bytes up: rows of
another model, of another image or of an earlier question are never used. Who asks keeps a deadline, and encodes the image itself when it is
over, so nothing here is sent twice.
"""

from __future__ import annotations

import hashlib

import msgspec

from tandem.wire.embeds import PromptEmbeds

# What one message carries of a part's rows: a frame is bounded, and a link is shared.
MOST_BYTES = 8 << 20


class WantedPart(msgspec.Struct, frozen=True):
    part: int
    length: int  # tokens that it becomes
    columns: int = 0  # see MediaFeature


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode these parts of an image, unless that takes longer than `timeout_s`: then nothing is waited for any more."""

    question: int  # unguessable
    reply_to: str
    epoch: int  # of the encoder node that is asked
    model: str  # the digest of its content
    digest: str  # of `file`
    file: bytes
    parts: list[WantedPart]
    timeout_s: float


class EncodedRows(msgspec.Struct, frozen=True, tag="rows"):
    question: int
    model: str
    identifier: str  # the part's, as MediaFeature has it
    first: int  # of the part's rows; those of one part come in order
    rows: PromptEmbeds
    checksum: bytes  # of the above


class EncodingRefused(msgspec.Struct, frozen=True, tag="refused"):
    """There will be no rows. What is wrong with an image its client hears from the node that reads the prompt, which tries for itself."""

    question: int
    reason: str


ToAsker = EncodedRows | EncodingRefused


def checksum(model: str, identifier: str, first: int, rows: PromptEmbeds) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    found.update(f"{model} {identifier} {first} {rows.dtype} {rows.width} ".encode())
    found.update(rows.data)
    return found.digest()
