"""What an answer's text means, piece by piece, and the contract of everything that reads it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each function that the model may call: some formats write values without saying their type."""


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegins(msgspec.Struct, frozen=True):
    id: str | None  # None: the format has none, and the answer makes one
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the last call's arguments, which together are JSON."""

    text: str


Piece = Text | Reasoning | CallBegins | Arguments


class AnswerReader(Protocol):
    """Text in, pieces out. However the text is cut, the pieces joined say the same.

    What turns out to be no call is text, as it was written. A call is told as soon as it is known to be one, and its
    arguments as they are written; what does not begin as calls do is held until it is complete.
    """

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The end of the answer. A call without its end mark counts, if it is one: the mark may be the stop token."""
        ...


class NotesCalls:
    """A reader that notes the names of the calls in `called`."""

    def __init__(self, reader: AnswerReader, called: list[str]) -> None:
        self._reader = reader
        self._called = called

    def push(self, text: str) -> list[Piece]:
        return self._noted(self._reader.push(text))

    def finish(self) -> list[Piece]:
        return self._noted(self._reader.finish())

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self._called += [piece.name for piece in pieces if isinstance(piece, CallBegins)]
        return pieces


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def json_value(text: str) -> Any:
    """None for what is not JSON, which is not told apart from null: neither is a call."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
