"""A node that reads prompts asks an encoder node for the rows of an image, which stand in place of its placeholders.

    Encode ──▶ the encoder node looks into its cache, or runs its vision tower
    ◀── EncodedRows, one or several for each part, or EncodingRefused

Rows are a function of the image's content and the model's. They are cached under the request's salt, too, which changes
nothing but who finds them. The question and the answer name both, and the receiver
checks a checksum, so rows of another model, of another image or of an earlier question are never used. The asking
node keeps a deadline and then encodes the image itself, so nothing here is sent twice.
"""

from __future__ import annotations

import hashlib

import msgspec

from tandem.wire.embeds import PromptEmbeds

# The most bytes of rows in one message: a frame's size is bounded, and other messages share the link.
MOST_BYTES = 8 << 20


class WantedPart(msgspec.Struct, frozen=True):
    part: int
    length: int  # the number of its placeholder tokens
    columns: int = 0  # see MediaFeature


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode these parts of an image, within `timeout_s`: after that the asking node does not wait."""

    question: int  # unguessable
    reply_to: str
    epoch: int  # of the encoder node that is asked
    model: str  # the digest of its content
    digest: str  # of `file`
    file: bytes
    parts: list[WantedPart]
    timeout_s: float
    salt: str | None = None  # the request's cache salt: the encoder node keeps rows apart by it


class EncodedRows(msgspec.Struct, frozen=True, tag="rows"):
    question: int
    model: str
    identifier: str  # the part's, as in MediaFeature
    first: int  # the part's row with which these begin; a part's messages come in order
    rows: PromptEmbeds
    checksum: bytes  # of `model`, `identifier`, `first` and `rows`


class EncodingRefused(msgspec.Struct, frozen=True, tag="refused"):
    """No rows will come. The asking node then encodes the image itself, and tells its client if the image is at
    fault."""

    question: int
    reason: str


ToAsker = EncodedRows | EncodingRefused


def checksum(model: str, identifier: str, first: int, rows: PromptEmbeds) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    found.update(f"{model} {identifier} {first} {rows.dtype} {rows.width} ".encode())
    found.update(rows.data)
    return found.digest()
