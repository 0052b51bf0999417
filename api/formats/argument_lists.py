"""Comma-separated arguments: where each ends, and the grammar of such a list."""

from __future__ import annotations

import re
from collections.abc import Sequence


class ArgumentScan:
    """Finds the end of one argument: a comma or the closing bracket, outside of brackets and quotes."""

    def __init__(self, quotes: Sequence[str], close: str, *, escapes: bool) -> None:
        self._marks = re.compile("|".join([*map(re.escape, quotes), r"\\" if escapes else "(?!)", r"[\[\](){},]"]))
        self._quotes = frozenset(quotes)
        self._close = close
        self._quote: str | None = None
        self._depth = 0
        self._at = 0

    def find(self, text: str, *, ended: bool) -> int | None:
        """Returns the end's position, or None while there is none. `text` begins with the argument, and may
        only grow between calls."""
        longest = max(map(len, self._quotes), default=1)
        while (found := self._marks.search(text, self._at)) is not None:
            if not ended and found.start() > len(text) - longest and longest > 1:
                return None  # this may be the beginning of a quote
            mark, self._at = found.group(), found.end()
            if mark == "\\":
                if self._at >= len(text) and not ended:
                    self._at = found.start()
                    return None
                self._at += 1 if self._quote is not None else 0
            elif self._quote is not None:
                self._quote = None if mark == self._quote else self._quote
            elif mark in self._quotes:
                self._quote = mark
            elif self._depth == 0 and mark in (",", self._close):
                self._at = found.start()
                return found.start()
            elif mark in "[({":
                self._depth += 1
            elif mark in "])}":
                self._depth -= 1
        self._at = max(self._at, len(text) - longest + 1)
        return None


def list_rules(rule: str, items: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Returns rules for items in their order, optional ones possibly missing, separated. The list is the rule
    `rule`_f0."""
    if not items:
        return [f'{rule}_f0: ""']
    rules: list[str] = []
    for at, (item, required) in enumerate(items):
        last = at == len(items) - 1
        rest = "" if last else f" {rule}_s{at + 1}"
        if required:
            rules.append(f"{rule}_f{at}: {item}{rest}")
            rules.append(f"{rule}_s{at}: {separator} {item}{rest}")
        else:
            rules.append(f"{rule}_f{at}: " + (f"({item})?" if last else f"{item}{rest} | {rule}_f{at + 1}"))
            rules.append(f"{rule}_s{at}: ({separator} {item})?{rest}")
    return rules
