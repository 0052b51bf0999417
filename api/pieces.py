"""The meanings of an answer's text, piece by piece, and the contract of its readers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""By function: the schema of its parameters. Some formats write values without their types."""


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegins(msgspec.Struct, frozen=True):
    id: str | None  # None: the format has no ids, and the answer makes one
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the last call's arguments. Together they are JSON."""

    text: str


Piece = Text | Reasoning | CallBegins | Arguments


class AnswerReader(Protocol):
    """Turns text into pieces. However the text is cut, the joined pieces are the same.

    Text that turns out to be no call is told as it was written. A call is told as soon as it is known to be
    one, and its arguments as they are written. Text that may be a call but does not begin like one is held
    until it is complete.
    """

    def push(self, text: str) -> list[Piece]: ...

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """Ends the answer. A call without its end mark counts if it is complete, because the mark may be the
        stop token. `cut`: the model would have written more, so what begins a mark or a call is no text."""


class NotesCalls:
    """Wraps a reader, and adds the names of its calls to `called`."""

    def __init__(self, reader: AnswerReader, called: list[str]) -> None:
        self._reader = reader
        self._called = called

    def push(self, text: str) -> list[Piece]:
        return self._noted(self._reader.push(text))

    def finish(self, *, cut: bool = False) -> list[Piece]:
        return self._noted(self._reader.finish(cut=cut))

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self._called += [piece.name for piece in pieces if isinstance(piece, CallBegins)]
        return pieces


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
