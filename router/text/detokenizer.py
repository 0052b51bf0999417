"""Token ids in, text out, as they come; a character whose bytes are split over tokens waits for all of them.

Byte-level BPE writes each byte as one printable character; the table of those is fixed (GPT-2's). With it a token's bytes
are a lookup, and text comes from an incremental UTF-8 decoder that cannot split a character.

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
    """Feed it text in pieces of any size: what it lets through is the same for every way of cutting the text."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certainly part of the answer. Once `matched` is set nothing more comes."""
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
        """The end of the stream: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the answer ends, if a stop string is complete. The one that is complete first wins.

        With the text cut differently the same one must win, so the order is that of completion; among those
        that end together the longest, because it began first.
        """
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
        """The first position from which the text could still grow into a stop string."""
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
        self._rest = b""  # of a character that is not complete

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
    """For every other tokenizer: its own decoder, which holds a token back until the text around it is settled.

    Tokens that stand for one byte each never come to that decoder: it takes a run of them that is not UTF-8 for as many
    U+FFFD, also those that it has already given as text, and fails. In their place it sees one that is a letter, so that
    what follows them does not begin the text.
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
        self._held: list[int] = []  # tokens since the stream last said anything

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
    """A piece with any character outside the table (an added token with a space) stands for its own text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_of_fallback(piece: str) -> bytes | None:
    """The byte of a token that stands for one byte, in tokenizers of characters: SentencePiece's byte fallback."""
    found = _FALLBACK.fullmatch(piece)
    return bytes.fromhex(found[1]) if found is not None else None
