"""A position in a text that is still being written. Readers are generators that wait where they need more
text."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from tandem.api.pieces import Piece

# The most text held back as a possible beginning of a call. A name with its marks is shorter.
MOST_HELD = 1_000
# So many characters of a mark are no text: shorter ones, such as "<", are often something else.
UNAMBIGUOUS = 3

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A running reader. Each `yield` waits until more text has arrived, or the end."""


class Cursor:
    """A position in a growing text. `rest`: text that has arrived and was not taken. `ended`: no more will
    arrive; `cut`: though the model would have written more."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self.cut = False
        self._kept: list[str] | None = None  # text taken since `keep`

    def keep(self) -> None:
        """From here on, taken text can be given back."""
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
        """Skips white space, up to the next other character or the end."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.ended:
                return
            yield

    def until(self, marks: Sequence[str], say: Callable[[str], None], least: int = UNAMBIGUOUS) -> Steps[str | None]:
        """Passes the text before the first mark to `say`, takes the mark and returns it; None if the text
        ended without one.

        Text that may become a mark is held back until that is decided. Where the text is cut, a mark's first
        characters, at least `least` of them, are dropped.
        """
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            if found:
                at, _, mark = min(found)
                # A longer mark may begin earlier, or here, and need more text.
                if self.ended or possible_start(self.rest, marks) >= at + len(mark):
                    if at:
                        say(self.take(at))
                    self.take(len(mark))
                    return mark
            if self.cut and not found:
                self._drop_cut_mark(marks, least)
            keep = len(self.rest) if self.ended else possible_start(self.rest, marks)
            if found:
                keep = min(keep, found[0][0])
            if keep:
                say(self.take(keep))
            if self.ended:
                return None
            yield

    def _drop_cut_mark(self, marks: Sequence[str], least: int) -> None:
        at = possible_start(self.rest, marks)
        if len(self.rest) - at >= least and not self.rest[at].isalnum():
            self.rest = self.rest[:at]

    def match(self, pattern: re.Pattern[str], possible: re.Pattern[str] | None = None) -> Steps[re.Match[str] | None]:
        """Takes and returns the pattern's match at this position, or returns None. It waits for more text
        while `rest` is short and `possible` matches it."""
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


class CursorReader:
    """A reader whose `_read` is a generator: it runs on whenever more text has arrived."""

    def __init__(self) -> None:
        self._cursor = Cursor()
        self._pieces: list[Piece] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Piece]:
        self._cursor.rest += text
        next(self._steps, None)
        pieces = self._pieces[:]
        self._pieces.clear()
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        self._cursor.ended, self._cursor.cut = True, cut
        return self.push("")

    def _read(self) -> Steps[None]:
        raise NotImplementedError


def possible_start(text: str, marks: Sequence[str]) -> int:
    """Returns where an incomplete mark may begin at the text's end; the text's length if nowhere."""
    longest = max(map(len, marks), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        tail = text[at:]
        if any(len(mark) > len(tail) and mark.startswith(tail) for mark in marks):
            return at
    return len(text)
