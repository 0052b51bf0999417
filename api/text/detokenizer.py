"""Token ids to text, as they arrive.

A character whose bytes are split over tokens waits for all of them. Byte-level BPE writes each byte as one printable character, by
GPT-2's fixed table. So a token's bytes are a lookup, and the text comes from an incremental UTF-8 decoder, which never splits a
character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_decode_utf8 = codecs.utf_8_decode
_LETTER = "a"


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; "" while a character is incomplete."""

    def finish(self) -> str:
        """Returns what is left at the end: bytes that never became a character, as U+FFFD."""


class ByteDetokenizer:
    """For byte-level tokenizers: each token stands for its bytes, and UTF-8 says where characters end."""

    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._rest = b""  # of an incomplete character

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        data = self._rest + b"".join(
            [table[token_id] for token_id in token_ids if token_id not in skipped and 0 <= token_id < len(table)]
        )
        text, taken = _decode_utf8(data, "replace", False)
        self._rest = data[taken:]
        return text

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class StreamDetokenizer:
    """For all other tokenizers: uses the tokenizer's own decoder, which holds a token back until the text
    around it is settled.

    Tokens for single bytes never reach that decoder: it turns a run of them that is not UTF-8 into as many
    U+FFFD, also bytes that it has already given as text, and then fails. In their place it gets a token that
    is a letter, so that what follows does not begin a text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, skipped: frozenset[int], byte_tokens: Mapping[int, bytes]
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._letter = next((token for token, byte in byte_tokens.items() if byte == _LETTER.encode()), None)
        self._decoder = _utf8_decoder(errors="replace")
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []  # tokens since the stream last gave text

    def push(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            byte = self._byte_tokens.get(token_id)
            if byte is not None and self._letter is not None:
                pieces.append(self._step(self._letter).removesuffix(_LETTER))
                pieces.append(self._decoder.decode(byte))
            else:
                pieces.append(self._decoder.decode(b"", final=True))
                pieces.append(self._step(token_id))
        return "".join(pieces)

    def _step(self, token_id: int) -> str:
        piece: str | None = self._stream.step(self._backend, token_id)
        if piece is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        return piece

    def finish(self) -> str:
        held, self._held = self._held, []
        text: str = self._backend.decode(held, skip_special_tokens=False) if held else ""
        return self._decoder.decode(b"", final=True) + text


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def bytes_of_piece(piece: str) -> bytes:
    """Returns a piece's bytes. A piece with a character outside the table (an added token with a space) is
    its own text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_of_fallback(piece: str) -> bytes | None:
    """Returns the byte of a token for one byte (SentencePiece's byte fallback), or None."""
    found = _FALLBACK.fullmatch(piece)
    return bytes.fromhex(found[1]) if found is not None else None
