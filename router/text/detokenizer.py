"""Token ids in, text out, as they come; a character whose bytes are split over tokens waits for all of them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: each token is its bytes, and UTF-8 says where characters end."""

    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = _utf8_decoder(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        data = b"".join(
            [
                table[token_id]
                for token_id in token_ids
                if token_id not in skipped and 0 <= token_id < len(table)
            ]
        )
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """For every other tokenizer: its own decoder, which holds a token back until the text around it is settled."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special: bool) -> None:
        self._backend = backend
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._held: list[int] = []  # tokens since the stream last said anything

    def push(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            piece = self._stream.step(self._backend, token_id)
            if piece is None:
                self._held.append(token_id)
            else:
                self._held.clear()
                pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        held, self._held = self._held, []
        text: str = self._backend.decode(held, skip_special_tokens=self._skip_special) if held else ""
        return text
