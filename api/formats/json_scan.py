"""JSON in an answer: written, read, and scanned in pieces of any size for an object's end and marks outside of strings."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_MARKS = re.compile(r'["\\{}\[\]]')
_BETWEEN = re.compile(r"[ \t\r\n;,]*")
_end_of_value = json.JSONDecoder().raw_decode


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


def values_in(text: str) -> list[Any] | None:
    """Parses values that are separated by white space, commas or semicolons. Returns None for any other text, at its first
    character that is none of them, however much follows."""
    values: list[Any] = []
    begin = _after_separators(text, 0)
    while begin < len(text):
        try:
            _, end = _end_of_value(text, begin)
        except (ValueError, RecursionError):
            return None
        if (value := json_value(text[begin:end])) is None:
            return None
        values.append(value)
        begin = _after_separators(text, end)
    return values


def _after_separators(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found is not None else at


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def json_value(text: str) -> Any:
    """Parses JSON. Returns None for invalid text and for null: neither is a call."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
