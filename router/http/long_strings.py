"""JSON with long strings, decoded so that no other thread waits long.

The standard library's decoder runs no other thread while it reads one string, however long that is. So long ones are cut out first, decoded
a piece at a time, and put where they were: the rest is short, or is many values.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from tandem.wire.errors import InvalidRequest

# One match, or one piece, is no longer than this.
WINDOW = 256 << 10
_LEAST = 64  # longer than any one unit, however small a window a test has

# What stands outside of strings, and whole strings; then a string that does not end in this window.
_TO_OPEN_STRING = re.compile(r'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+(?:(")|\Z)', re.DOTALL)
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Whole characters and escapes. The first half of a pair is taken with what follows it, so that is seen first.
_UNITS = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[^\\]{4}|\\u[dD][89abAB][^\\]{2}(?:\\u[dD][c-fC-F][^\\]{2}|(?=[^\\]|\\[^u]|\\u[^\\]{4})))*+",
    re.DOTALL,
)

Decode = Callable[[str], Any]


def decode_in_pieces(text: str, decode: Decode, window: int = WINDOW) -> Any:
    """As `decode(text)`, errors and their places too; but a member's name as long as that is refused."""
    if len(text) <= 2 * window:
        return decode(text)
    window = max(window, _LEAST)
    spans = _long_strings(text, window)
    if not spans:
        return decode(text)
    whole: list[str] = []
    mistake: json.JSONDecodeError | None = None
    try:
        whole += (_string(text, start, end, window) for start, end in spans)
    except json.JSONDecodeError as error:
        mistake = error
    # A word for each that stands nowhere else.
    word = secrets.token_hex(16)
    parts, at = [], 0
    for index, (start, end) in enumerate(spans):
        parts += [text[at:start], f"{word}{index:08}"]
        at = end
    try:
        value = decode("".join([*parts, text[at:]]))
    except json.JSONDecodeError as error:
        place = _place(error.pos, spans, len(word) + 8)
        if mistake is None or place < mistake.pos:
            raise json.JSONDecodeError(error.msg, text, place) from None
    if mistake is not None:
        raise mistake
    holder = [value]
    _put_back(holder, word, whole)
    return holder[0]


def _long_strings(text: str, window: int) -> list[tuple[int, int]]:
    """Where those lie that are longer than a window, without their quotes. One that has no end is left to the decoder."""
    spans: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        found = _TO_OPEN_STRING.match(text, at, at + 2 * window)
        if found is None or found[1] is None:
            at += 2 * window if found is None else max(found.end() - at, 1)
            continue
        if found.start(1) > at:  # it is looked at again from its beginning
            at = found.start(1)
            continue
        start = end = at + 1
        while end < len(text) and text[end] != '"':
            reached = _IN_STRING.match(text, end, end + window)
            end = reached.end() if reached is not None and reached.end() > end else end + 2
        if end >= len(text):
            break
        spans.append((start, end))
        at = end + 1
    return spans


def _string(text: str, start: int, end: int, window: int) -> str:
    pieces: list[str] = []
    while start < end:
        cut = end
        if end - start > window:
            found = _UNITS.match(text, start, start + window)
            # Nothing whole: an escape that is none, of which the decoder says what is wrong.
            cut = found.end() if found is not None and found.end() > start else start + _LEAST
        try:
            pieces.append(json.loads(f'"{text[start:cut]}"'))
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, text, start + error.pos - 1) from None
        start = cut
    return "".join(pieces)


def _place(place: int, spans: list[tuple[int, int]], length: int) -> int:
    """In the whole text, of one in what was decoded, where each of the strings was so long."""
    for start, end in spans:
        if place <= start:
            break
        place += end - start - length
    return place


def _put_back(holder: list[Any], word: str, whole: list[str]) -> None:
    """Level by level."""
    level: list[Any] = [holder]
    while level:
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict) and any(name.startswith(word) for name in each):
                raise InvalidRequest(
                    "the body has an unknown member: its name is longer than any that is known"
                )
            for key, child in list(each.items() if isinstance(each, dict) else enumerate(each)):
                if isinstance(child, dict | list):
                    deeper.append(child)
                elif isinstance(child, str) and child.startswith(word):
                    each[key] = whole[int(child[len(word) :])]
        level = deeper
