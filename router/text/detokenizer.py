"""Turns token ids into text as they arrive. A character whose bytes are split over tokens waits for all of
them.

Byte-level BPE writes each byte as one printable character, by GPT-2's fixed table. So a token's bytes are a
lookup, and the text comes from an incremental UTF-8 decoder, which never splits a character.

A stop string is found wherever it ends, also across tokens; text that may become one is held back.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream


class StopMatcher:
    """Finds stop strings in text that arrives in pieces. The result does not depend on how the text is
    cut."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is certainly part of the answer. Returns "" once `matched` is set."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end = self._first_match(text)
        if end is not None:
            self._held = ""
            return text[:end]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Ends the stream. Returns what was held back, which is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Returns where the answer ends if a stop string is complete. The first to be complete wins,
        whichever way the text was cut; among those complete at the same character, the longest, because it
        began first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        self.matched = best[2]
        return best[0] if self._include_stop else best[1]

    def _possible_start(self, text: str) -> int:
        """Returns the first position from which the text could still grow into a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_decode_utf8 = codecs.utf_8_decode
_LETTER = "a"


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Returns what is left at the end: bytes that never became a character, as U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: each token stands for its bytes, and UTF-8 says where characters end."""

    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._rest = b""  # of an incomplete character

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        data = self._rest + b"".join(
            [
                table[token_id]
                for token_id in token_ids
                if token_id not in skipped and 0 <= token_id < len(table)
            ]
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
