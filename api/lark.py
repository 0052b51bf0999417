"""Writes parts of grammars in llguidance's Lark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.api.text.tokenizer import Tokenizer

JsonObject = dict[str, Any]

MAX_GRAMMAR = 256 * 1024  # characters
ANY_TEXT = r"/(.|\n)*/"
SOME_SPACE = r"/[\x20\x0A]{0,8}/"

# Without a bound, a model could write white space forever and still follow the grammar.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A]{1,40}"}


def quoted(text: str) -> str:
    """Returns a literal of the grammar."""
    return msgspec.json.encode(text).decode()


def json_schema(schema: JsonObject, *, lenient: bool = False) -> str:
    """Returns a schema as `%json` takes it. `lenient`: leave out what the grammar library cannot enforce."""
    options = {**_JSON_OPTIONS, "lenient": True} if lenient else _JSON_OPTIONS
    return msgspec.json.encode({**schema, "x-guidance": options}).decode()


def nested(grammar: str) -> str:
    """Wraps a whole grammar, with its own start and names, for use in a rule."""
    return f"%lark {{\n{grammar}\n}}"


class LarkWriter:
    """Writes literals. Marks that are special tokens are written as tokens, because no text spells them."""

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
        self._ids = {mark: tokenizer.token_id(mark) for mark in marks if tokenizer.is_special(mark)}
        alternatives = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))
        self._mark = re.compile(f"({alternatives or '(?!)'})")

    def literal(self, text: str) -> str:
        parts = (part for part in self._mark.split(text) if part)
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else quoted(part) for part in parts)

    def text_until(self, rule: str, mark: str, text: str = ANY_TEXT) -> str:
        """Returns a rule for any text up to and including the mark."""
        if (found := self._mark.search(mark)) is not None:
            return f"{rule}: {text} {self.literal(mark[found.start() :])}"
        return f"{rule}[lazy]: {text} {quoted(mark)}"
