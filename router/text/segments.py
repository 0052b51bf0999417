"""Texts that have been tokenized before, cut where a cut changes nothing.

A tokenizer looks for its added tokens first, in the text as it is, and tokenizes what lies between them piece by piece. So a text's ids are those
of its segments, one after the other, when each segment but the first begins with such a token. In a chat each message is a
segment: only what is new in a turn has to be tokenized.

What is new has words that came before. Byte-level tokenizers of the usual kinds never look beyond a space that follows something else, so
there a text's ids are those of its words, which are looked up (`WordCache`).
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

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


# What cuts a text into pieces before byte-level BPE: the patterns of GPT-2 (`ByteLevel` has its own), Llama 3, Qwen 2 and GPT-4o. None of
# their pieces has a space after another character, unless that is white space, too; and none of them looks back.
_PATTERNS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Characters that are white space in no table, at the end of what stands before a space.
_ENDS_WORD = re.compile("[!-~\u00c0-\u02ff\u0370-\u058f\uac00-\ud7a3]\\Z")
# Words are many and short; a longer one is seldom met again.
WORD_CHARACTERS = 32
MOST_WORDS = 32_768
# A text with more words that are new is tokenized as a whole, which takes less, and these are learned for the next.
MOST_NEW_WORDS = 48


def keeps_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether a text's ids are those of its words, wherever it is cut before a space that follows no white space."""
    if any(
        token.single_word or token.lstrip or token.rstrip or re.search(r"\s", token.content)
        for token in backend.get_added_tokens_decoder().values()
    ):
        return False
    made = json.loads(backend.to_str())
    model, normalizer, cutting = made["model"], made["normalizer"], made["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("dropout") or (normalizer and normalizer["type"] != "NFC"):
        return False
    steps = cutting["pretokenizers"] if cutting and cutting["type"] == "Sequence" else [cutting]
    return len(steps) in (1, 2) and all(steps) and _is_byte_level(steps[-1]) and _cuts(*steps)


def _is_byte_level(step: dict[str, Any]) -> bool:
    return step["type"] == "ByteLevel" and step["add_prefix_space"] is False


def _cuts(first: dict[str, Any], last: dict[str, Any] | None = None) -> bool:
    """At every such place."""
    if last is None or first["type"] == "Digits":
        return bool((last or first)["use_regex"])
    return (
        first["type"] == "Split"
        and first["pattern"].get("Regex") in _PATTERNS
        and first["behavior"] == "Isolated"
        and not first["invert"]
        and not last["use_regex"]
    )


class WordCache:
    """The ids of words, each with the space before it. Safe to use from several threads: what two of them find out at once is the same."""

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._ids: dict[str, Sequence[int]] = {}  # the word's, without its space
        self._first_ids: dict[str, Sequence[int]] = {}  # of what a text begins with

    def encode(self, text: str) -> list[int]:
        words = text.split(" ")
        found = [*map(self._ids.get, words)]
        found[0] = self._first_ids.get(words[0])
        if None in found:
            return self._learn(text, words, found)
        ids: list[int] = []
        for one in found:
            ids += one  # type: ignore[arg-type]  # none of them is None
        return ids

    def _learn(self, text: str, words: list[str], found: list[Sequence[int] | None]) -> list[int]:
        if not all(_ENDS_WORD.search(words[i]) for i, one in enumerate(found[:-1]) if one is None):
            words = _joined(words)
            found = [None, *map(self._ids.get, words[1:])]
        new = list(dict.fromkeys(word for word, one in zip(words[1:], found[1:], strict=True) if one is None))
        few = len(new) <= MOST_NEW_WORDS
        first = words[0] if few else text
        of_first, *of_new = self._encode([first, *(f" {word}" for word in new[:MOST_NEW_WORDS])])
        here = dict(zip(new, of_new, strict=False))
        self._ids = _kept(self._ids, here)
        if not few:
            return list(of_first)
        self._first_ids = _kept(self._first_ids, {first: of_first})
        ids = list(of_first)
        for word, one in zip(words[1:], found[1:], strict=True):
            ids += here[word] if one is None else one
        return ids


def _kept(known: dict[str, Sequence[int]], found: dict[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """With what was found. When there are too many it begins again: what is in use is soon there."""
    if len(known) + len(found) > MOST_WORDS:
        known = {}
    for word, ids in found.items():
        if len(word) <= WORD_CHARACTERS and _ENDS_WORD.search(word):
            known[word] = ids
    return known


def _joined(words: list[str]) -> list[str]:
    """With what follows them, those after which the text must not be cut."""
    joined: list[str] = []
    open_ended = False
    for word in words:
        if open_ended:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        open_ended = _ENDS_WORD.search(word) is None
    return joined


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
        parts: list[Sequence[int] | None] = []
        with self._lock:
            for key in keys:
                found = self._known.get(key)
                if found is not None:
                    self._known.move_to_end(key)
                parts.append(found)
        if None in parts:
            missing = [i for i, part in enumerate(parts) if part is None]
            for i, ids in zip(missing, self._encode([keys[i][1] for i in missing]), strict=True):
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
