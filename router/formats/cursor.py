"""A place in a text that is still being written, for readers in plain style: they wait where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

# A name with the marks around it is shorter; what is longer is no call's beginning.
MOST_HELD = 1_000

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader at work. Each `yield` waits until more text has come, or the end."""


class Cursor:
    """`rest` is what has come and was not taken yet. `ended`: nothing more comes."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self._kept: list[str] | None = None  # what was taken since `keep`

    def keep(self) -> None:
        """From here on what is taken can be given back."""
        self._kept = []

    def let_go(self) -> None:
        self._kept = None

    def give_back(self) -> None:
        self.rest = "".join(self._kept or ()) + self.rest
        self._kept = None

    def take(self, count: int) -> str:
        taken, self.rest = self.rest[:count], self.rest[count:]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def skip_space(self) -> Steps[None]:
        """To the next character that is none, or the end."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.ended:
                return
            yield

    def until(self, marks: Sequence[str], say: Callable[[str], None]) -> Steps[str | None]:
        """Says what stands before the first of the marks, and takes that. None: the text ended without one.

        What may become a mark is held back until it is decided.
        """
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            if found:
                at, _, mark = min(found)
                # A longer mark may begin earlier, or at the same place, and need more text.
                if self.ended or possible_start(self.rest, marks) >= at + len(mark):
                    if at:
                        say(self.take(at))
                    self.take(len(mark))
                    return mark
            keep = len(self.rest) if self.ended else possible_start(self.rest, marks)
            if found:
                keep = min(keep, found[0][0])
            if keep:
                say(self.take(keep))
            if self.ended:
                return None
            yield

    def match(
        self, pattern: re.Pattern[str], possible: re.Pattern[str] | None = None
    ) -> Steps[re.Match[str] | None]:
        """Takes what the pattern matches here. It is tried again with more text, as long as what there is may be
        possible and is short."""
        while (found := pattern.match(self.rest)) is None:
            if self.ended or len(self.rest) >= MOST_HELD:
                return None
            if possible is not None and possible.fullmatch(self.rest) is None:
                return None
            yield
        self.take(found.end())
        return found

    def starts_with(self, mark: str) -> Steps[bool]:
        while len(self.rest) < len(mark) and mark.startswith(self.rest) and not self.ended:
            yield
        return self.rest.startswith(mark)


def possible_start(text: str, marks: Sequence[str]) -> int:
    """Where one of the marks might be beginning, incomplete, at the text's end; its length if nowhere."""
    longest = max(map(len, marks), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        tail = text[at:]
        if any(len(mark) > len(tail) and mark.startswith(tail) for mark in marks):
            return at
    return len(text)
