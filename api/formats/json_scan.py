"""JSON in an answer: written, read, and scanned in pieces of any size for an object's end and marks outside of strings."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_MARKS = re.compile(r'["\\{}\[\]]')


class JsonScan:
    """Scans text that should be JSON, and tracks the depth in brackets and whether it is in a string."""

    def __init__(self, depth: int = 0) -> None:
        self.in_string = False
        self._depth = depth
        self._escaped = False

    def until(self, text: str, at: int, depth: int | None) -> int | None:
        """Scans from `at` to the bracket that closes down to `depth`. Returns the position after it, or None
        when all of the text was scanned."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _MARKS.search(text, at)
            if found is None:
                return None
            at = found.end()
            if self._closes(found.group()) and self._depth == depth:
                return at
        return None

    def _closes(self, mark: str) -> bool:
        if self.in_string:
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self.in_string = False
            return False
        if mark == '"':
            self.in_string = self._depth > 0  # outside of all brackets a quote is not JSON's
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            return True
        return False


class EndSearch:
    """Finds the mark that ends a call. Inside one of the call's strings the mark is part of the value."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._scan = JsonScan()
        self._at = 0

    def find(self, text: str) -> int:
        """Returns the mark's position, or -1. `text` begins with the call, and may only grow between calls of
        this method."""
        while (found := text.find(self._mark, self._at)) >= 0:
            self._scan.until(text[self._at : found], 0, None)
            if not self._scan.in_string:
                self._at = found
                return found
            self._scan.until(self._mark, 0, None)
            self._at = found + len(self._mark)
        return -1


def objects(text: str) -> list[str]:
    """Splits a text into objects that are separated by white space, commas or semicolons."""
    found: list[str] = []
    end: int | None = 0
    while end is not None and end < len(text):
        begin, end = end, JsonScan().until(text, end, 0)
        found.append(text[begin:end].strip(" \t\r\n;,"))
    return [one for one in found if one]


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def json_value(text: str) -> Any:
    """Parses JSON. Returns None for invalid text and for null: neither is a call."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
