"""The bytes that a token stands for, in tokenizers that work on bytes.

Byte-level BPE writes each byte as one printable character; the table of those is fixed (GPT-2's). With it a
token's bytes are a lookup, and text comes from an incremental UTF-8 decoder that cannot split a character.
"""

from __future__ import annotations

import re


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def bytes_of_piece(piece: str) -> bytes:
    """A piece with any character outside the table (an added token with a space) stands for its own text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_of_fallback(piece: str) -> bytes | None:
    """Of a token that stands for one byte, in tokenizers of characters: SentencePiece's byte fallback."""
    found = _FALLBACK.fullmatch(piece)
    return bytes.fromhex(found[1]) if found is not None else None
