"""Reads an answer in pieces of any size, as it comes from a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tandem.api.pieces import AnswerReader, Arguments, CallBegins, Piece, Reasoning, Text


def read(reader: AnswerReader | None, text: str, cuts: Sequence[int] = (), *, cut: bool = False) -> list[Piece]:
    """`cuts`: where the text is cut into what comes at once. `cut`: the answer was cut off at the text's end."""
    assert reader is not None
    edges = [0, *sorted(cuts), len(text)]
    pieces = [piece for start, end in pairwise(edges) for piece in reader.push(text[start:end])]
    return pieces + reader.finish(cut=cut)


class Told(NamedTuple):
    text: str
    reasoning: str
    calls: list[tuple[str, str]]


def told(pieces: Sequence[Piece]) -> Told:
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            calls.append([piece.name, ""])
        elif isinstance(piece, Arguments):
            calls[-1][1] += piece.text
    return Told(
        "".join(piece.text for piece in pieces if isinstance(piece, Text)),
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        [(name, arguments) for name, arguments in calls],
    )
