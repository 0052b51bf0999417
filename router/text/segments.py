"""Texts that have been tokenized before, cut where a cut changes nothing.

A tokenizer looks for its added tokens first, in the text as it is, and tokenizes what lies between them piece by piece. So a text's ids are those
of its segments, one after the other, when each segment but the first begins with such a token. In a chat each message is a
segment: only what is new in a turn has to be tokenized.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import tokenizers

# A shorter segment is tokenized sooner than it is found.
LEAST_CHARACTERS = 64
_CHARACTER_BYTES, _ID_BYTES, _ENTRY_BYTES = 2, 4, 400

_Key = tuple[bool, str]  # whether it is its text's first, and the segment


def boundaries_of(backend: tokenizers.Tokenizer) -> tuple[re.Pattern[str], frozenset[str]] | None:
    """What finds the added tokens in a text, and those of them before which it may be cut. None: nowhere."""
    added = list(backend.get_added_tokens_decoder().values())
    # One that must be a word of its own looks at what is beside it, which a cut would hide.
    if any(token.single_word for token in added):
        return None
    in_text = sorted(
        {token.content for token in added if not token.normalized and token.content}, key=len, reverse=True
    )
    strips = {token.content for token in added if token.lstrip or token.rstrip}
    cuts = frozenset(in_text) - strips
    # The longest first, and the leftmost: as the tokenizer finds them.
    return (re.compile("|".join(map(re.escape, in_text))), cuts) if cuts else None


class SegmentCache:
    """Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        encode: Callable[[list[str]], Sequence[Sequence[int]]],
        most_bytes: int,
    ) -> None:
        """`backend`: what `encode` encodes with; None: a text is known as a whole, or not."""
        self._boundaries = boundaries_of(backend) if backend is not None else None
        self._encode = encode
        self._most_bytes = most_bytes
        self._bytes = 0
        self._known: OrderedDict[_Key, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def segments(self, text: str) -> list[str]:
        if self._boundaries is None:
            return [text]
        pattern, cuts = self._boundaries
        starts = [
            found.start() for found in pattern.finditer(text) if found.start() and found.group() in cuts
        ]
        return [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True)]

    def encode(self, text: str) -> list[int]:
        # The first is at the text's beginning, where some tokenizers put a space.
        keys = [(i == 0, segment) for i, segment in enumerate(self.segments(text))]
        parts: list[Sequence[int] | None] = [None] * len(keys)
        with self._lock:
            for i, key in enumerate(keys):
                found = self._known.get(key)
                if found is not None:
                    self._known.move_to_end(key)
                    parts[i] = found
        missing = [i for i, part in enumerate(parts) if part is None]
        encoded = self._encode([keys[i][1] for i in missing]) if missing else ()
        for i, ids in zip(missing, encoded, strict=True):
            parts[i] = ids
            if len(keys[i][1]) >= LEAST_CHARACTERS:
                self._keep(keys[i], array("I", ids))
        together: list[int] = []
        for part in parts:
            together += part or ()
        return together

    def _keep(self, key: _Key, ids: array[int]) -> None:
        size = _size(key, ids)
        if size > self._most_bytes // 4:
            return
        with self._lock:
            if key in self._known:
                return
            self._known[key] = ids
            self._bytes += size
            while self._bytes > self._most_bytes:
                self._bytes -= _size(*self._known.popitem(last=False))


def _size(key: _Key, ids: array[int]) -> int:
    return _CHARACTER_BYTES * len(key[1]) + _ID_BYTES * len(ids) + _ENTRY_BYTES
