"""A call as it is being written: where its arguments begin, and where they end."""

from __future__ import annotations

import re

# One object of a name and its arguments, in the order in which models are taught to write them.
HEAD = re.compile(r'[\s,;\[]*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
BETWEEN = " \t\r\n,;[]"

_MARKS = re.compile(r'["\\{}\[\]]')


class CallScan:
    """Text behind the head of a call. First its arguments, then what is left of the object around them."""

    def __init__(self) -> None:
        self._depth = 1  # of the object around the arguments
        self._in_string = False
        self._escaped = False
        self._arguments_over = False
        self.over = False

    def take(self, text: str) -> tuple[str, int]:
        """What of the text is arguments, and how much of it belongs to the call."""
        arguments_end = 0 if self._arguments_over else len(text)
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _MARKS.search(text, at)
            if found is None:
                break
            at = found.end()
            if self._read(found.group()) and not self._arguments_over:
                self._arguments_over = True
                arguments_end = at
            if self._depth == 0:
                self.over = True
                return text[:arguments_end], at
        return text[:arguments_end], len(text)

    def _read(self, mark: str) -> bool:
        """True at the brace that closes the arguments."""
        if self._in_string:
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._in_string = False
            return False
        if mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            return self._depth == 1
        return False
