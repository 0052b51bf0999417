"""The ids of words that were tokenized before.

New messages repeat words. Byte-level tokenizers of the usual kinds never look across a space that follows a character other than
white space. So a text's ids are those of its words, which are looked up.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tokenizers

# The patterns that cut a text into pieces before byte-level BPE, of GPT-2 (`ByteLevel` has its own), Llama 3,
# Qwen 2 and GPT-4o. No piece has a space after a character other than white space, and no pattern looks back.
_PATTERNS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Characters that no table counts as white space. A text may be cut before a space that follows one of them.
_ENDS_WORD = re.compile("[!-~\u00c0-\u02ff\u0370-\u058f\uac00-\ud7a3]")
# Longer words seldom occur again, so they are not kept.
WORD_CHARACTERS = 32
MOST_WORDS = 32_768
# A text with more new words is tokenized as a whole, which is faster, and so many of them are learned for the
# next text.
MOST_NEW_WORDS = 48


def keeps_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether a text's ids are those of its words, if it is cut before spaces that follow no white space."""
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
    """Whether this pre-tokenizer cuts at every such place."""
    if last is None or first["type"] == "Digits":
        return bool((last or first)["use_regex"])
    return (
        first["type"] == "Split"
        and first["pattern"].get("Regex") in _PATTERNS
        and first["behavior"] == "Isolated"
        and not first["invert"]
        and not last["use_regex"]
    )


class _Words(NamedTuple):
    """The words of one tenant."""

    ids: dict[str, Sequence[int]]  # by word, without its space
    first_ids: dict[str, Sequence[int]]  # by the first word of a text

    @property
    def size(self) -> int:
        return len(self.ids) + len(self.first_ids)

    def look_up(self, words: list[str]) -> list[Sequence[int] | None]:
        found = [*map(self.ids.get, words)]
        found[0] = self.first_ids.get(words[0])
        return found


_NO_WORDS = _Words({}, {})


class WordCache:
    """The ids of words, each with the space before it, tenant by tenant: which words are known, and so fast, tells
    nothing of another tenant's texts. Thread-safe: two threads that learn the same word learn the same ids."""

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._known: dict[str, _Words] = {}  # by tenant
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str, tenant: str = "") -> list[int]:
        known = self._known.get(tenant, _NO_WORDS)
        words = text.split(" ")
        found = known.look_up(words)
        return self._learn(known, tenant, text, words, found) if None in found else _together(found)

    def _learn(
        self, known: _Words, tenant: str, text: str, words: list[str], found: list[Sequence[int] | None]
    ) -> list[int]:
        """Tokenizes only the words that were not found, which in a long text are few."""
        missing = [place for place, one in enumerate(found) if one is None]
        if not all(_ends_word(words[place]) for place in missing if place + 1 < len(words)):
            words = _joined(words)
            found = known.look_up(words)
            missing = [place for place, one in enumerate(found) if one is None]
        new = list(dict.fromkeys([words[place] for place in missing if place]))
        few = len(new) <= MOST_NEW_WORDS
        first = words[0] if few else text
        of_first, *of_new = self._encode([first, *(f" {word}" for word in new[:MOST_NEW_WORDS])])
        here = dict(zip(new, of_new, strict=False))
        self._keep(tenant, here, {first: of_first} if few else {})
        if not few:
            return list(of_first)
        for place in missing:
            found[place] = here[words[place]] if place else of_first
        return _together(found)

    def _keep(self, tenant: str, words: dict[str, Sequence[int]], first: dict[str, Sequence[int]]) -> None:
        """Adds what was found. When there are too many entries, the tenant with most starts again from empty, and
        its words in use soon return."""
        words, first = words and _worth_keeping(words), first and _worth_keeping(first)
        if not (words or first):
            return
        with self._lock:
            known = self._known.get(tenant) or self._known.setdefault(tenant, _Words({}, {}))
            before = known.size
            known.ids.update(words)
            known.first_ids.update(first)
            self._size += known.size - before
            while self._size > MOST_WORDS:
                largest = max(self._known, key=lambda name: self._known[name].size)
                self._size -= self._known.pop(largest).size


def _together(found: list[Sequence[int] | None]) -> list[int]:
    """Joins the ids. The caller has made sure that none is None."""
    ids: list[int] = []
    return functools.reduce(operator.iconcat, found, ids)


def _ends_word(word: str) -> bool:
    return _ENDS_WORD.match(word[-1:]) is not None


def _worth_keeping(found: dict[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {word: ids for word, ids in found.items() if len(word) <= WORD_CHARACTERS and _ends_word(word)}


def _joined(words: list[str]) -> list[str]:
    """Joins each word after which the text must not be cut with the next one."""
    joined: list[str] = []
    open_ended = False
    for word in words:
        if open_ended:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        open_ended = not _ends_word(word)
    return joined
