"""JSON of any size in bounded pieces, so that one large answer does not stop the other streams.

Whatever writes such pieces makes them one by one and lets others on the event loop have their turn in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

TURN_S = 0.002
_CHARACTERS = 16 << 10  # of one piece
_ITEMS = 1024
_NUMBERS = frozenset({int, float, bool, type(None)})

_encode = msgspec.json.Encoder().encode


class RawPieces:
    """A value that is JSON already."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces

    def joined(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join(self.pieces))


def json_pieces(value: Any) -> Iterator[bytes]:
    """`value` as msgspec would encode it. An iterator in it is a list whose items are made as they are written;
    objects are looked into, lists are not, except for their length."""
    if _is_small(value):
        yield _encode(value)
    elif isinstance(value, RawPieces):
        yield from value.pieces
    elif isinstance(value, Mapping):
        before = b"{"
        small: dict[str, Any] = {}
        for name, item in value.items():
            if _is_small(item):
                small[name] = item
                continue
            if small:
                yield before + _encode(small)[1:-1]
                small, before = {}, b","
            yield before + _encode(name) + b":"
            yield from json_pieces(item)
            before = b","
        yield before + _encode(small)[1:] if small else b"}"
    elif isinstance(value, Iterator):
        before = b"["
        for item in value:
            yield before
            yield from json_pieces(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    elif isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), _CHARACTERS):
            yield _encode(value[start : start + _CHARACTERS])[1:-1]
        yield b'"'
    else:
        for start in range(0, len(value), _ITEMS):
            yield (b"," if start else b"[") + _encode(value[start : start + _ITEMS])[1:-1]
        yield b"]"


def _is_small(value: Any) -> bool:
    """It may be made at once."""
    kind = type(value)
    if kind is str:
        return len(value) <= _CHARACTERS
    if kind in _NUMBERS:
        return True
    if kind is list:
        return len(value) <= _ITEMS
    if kind is dict:
        return len(value) <= _ITEMS and all(map(_is_small, value.values()))
    return not isinstance(value, Iterator | RawPieces | Mapping)


class LoopTurn:
    """How long one task has had the event loop."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """To be called when the task was woken up: what it waited is not its turn."""
        self._until = time.monotonic() + TURN_S

    async def pass_on(self) -> None:
        """To others, if this one has had its turn."""
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self.begin()
