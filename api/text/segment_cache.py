"""The ids of texts' segments that were tokenized before.

A tokenizer first looks for added tokens in the text and then tokenizes what is between them. So a text's ids are those of its
segments in order, if each segment but the first begins with an added token. In a chat each message is a segment, so only a turn's
new messages are tokenized.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence

import tokenizers

from tandem.api.text.tenant_cache import NO_OWNER, CacheOwner, TenantCache

# Tokenizing a shorter segment is faster than looking it up.
LEAST_CHARACTERS = 64
_CHARACTER_BYTES, _ID_BYTES, _ENTRY_BYTES = 2, 4, 400

# How much of a text a pattern searches in one call. The interpreter's lock is held for that long, also in a thread.
WINDOW_CHARACTERS = 64 << 10


def matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """Returns what `pattern.finditer(text)` does, and lets other threads run in between. The pattern is of fixed
    texts of at most `longest` characters."""
    if len(text) <= WINDOW_CHARACTERS:
        return pattern.finditer(text)
    return _matches_in_windows(pattern, text, longest)


def _matches_in_windows(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        end = at + WINDOW_CHARACTERS
        at = end
        for found in pattern.finditer(text, end - WINDOW_CHARACTERS, end + longest - 1):
            if found.start() >= end:
                break
            yield found
            at = max(end, found.end())


_Key = tuple[bool, str]  # whether it is the first of its text, and the segment


def boundaries_of(backend: tokenizers.Tokenizer) -> tuple[re.Pattern[str], frozenset[str], int] | None:
    """Returns a pattern that finds added tokens in a text, those before which the text may be cut, and the
    longest one's length; None when it may not be cut at all."""
    added = list(backend.get_added_tokens_decoder().values())
    # A token that must be a whole word depends on its neighbours, which a cut would hide.
    if any(token.single_word for token in added):
        return None
    in_text = sorted(
        {token.content for token in added if not token.normalized and token.content}, key=len, reverse=True
    )
    strips = {token.content for token in added if token.lstrip or token.rstrip}
    cuts = frozenset(in_text) - strips
    # The leftmost and then the longest, as the tokenizer matches.
    return (re.compile("|".join(map(re.escape, in_text))), cuts, len(in_text[0])) if cuts else None


class SegmentCache:
    """The ids of texts' segments, the most recently used ones of each tenant. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        encode: Callable[[list[str], str], Sequence[Sequence[int]]],
        most_bytes: int,
    ) -> None:
        """`backend`: the tokenizer behind `encode`. None: a text is cached as a whole, and never cut. `encode` gets
        segments and their tenant."""
        self._boundaries = boundaries_of(backend) if backend is not None else None
        self._encode = encode
        self._most_bytes = most_bytes
        self._known: TenantCache[_Key, array[int]] = TenantCache(most_bytes)

    def segments(self, text: str) -> list[str]:
        if self._boundaries is None:
            return [text]
        pattern, cuts, longest = self._boundaries
        starts = [found.start() for found in matches(pattern, text, longest) if found.start() and found.group() in cuts]
        return [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True)]

    @property
    def size(self) -> int:
        """The bytes of all entries."""
        return self._known.size

    def encode(self, text: str, owner: CacheOwner = NO_OWNER) -> list[int]:
        # The first segment begins the text, where some tokenizers add a space.
        keys = [(i == 0, segment) for i, segment in enumerate(self.segments(text))]
        parts: list[Sequence[int] | None] = [*self._known.get_all(owner, keys)]
        if None in parts:
            missing = [i for i, part in enumerate(parts) if part is None]
            made = self._encode([keys[i][1] for i in missing], owner.tenant)
            for i, ids in zip(missing, made, strict=True):
                parts[i] = ids
                if len(keys[i][1]) >= LEAST_CHARACTERS:
                    self._keep(owner, keys[i], array("I", ids))
        together: list[int] = []
        for part in parts:
            together += part or ()
        return together

    def _keep(self, owner: CacheOwner, key: _Key, ids: array[int]) -> None:
        size = _size(key, ids)
        if size <= self._most_bytes // 4:
            self._known.put(owner, key, ids, size)


def _size(key: _Key, ids: array[int]) -> int:
    return _CHARACTER_BYTES * len(key[1]) + _ID_BYTES * len(ids) + _ENTRY_BYTES
