"""Calls in an answer's text: the contract of a call format, and the reader that all of them share."""

from __future__ import annotations

import re
from typing import Any, Protocol

import msgspec

from tandem.api.formats.cursor import UNAMBIGUOUS, Cursor, CursorReader, Steps
from tandem.api.lark import LarkWriter
from tandem.api.pieces import Arguments, CallBegins, Piece, Text, ToolSchemas


class Layout(msgspec.Struct, frozen=True):
    """What a model writes around its calls. `marks`: the texts of these that may be special tokens."""

    begin: str = ""
    call_begin: str = ""
    call_end: str = ""
    between: str = ""
    end: str = ""
    marks: tuple[str, ...] = ()
    most: int = 16  # the most calls that a grammar allows in one answer
    last: bool = False  # calls go on to the answer's end


class CallWriting(Protocol):
    """How one family of models writes calls. It has no state, so one object serves all requests."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin calls."""

    @property
    def opening(self) -> str | None:
        """An answer that begins with this is a call even without a mark."""

    @property
    def layout(self) -> Layout: ...

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        """Returns the grammar of one call without the layout's marks. The names of all further rules begin
        with `rule`."""


class CallFormat(CallWriting, Protocol):
    def read(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas) -> Steps[None]:
        """Reads from after a mark to the end of the calls that it begins. If it tells the sink of no call,
        the text has none."""


class CallSink:
    """Takes what a format finds. With the first call, the text read so far can no longer be given back."""

    def __init__(self, cursor: Cursor, pieces: list[Piece]) -> None:
        self._cursor = cursor
        self._pieces = pieces
        self.began = False

    def call(self, name: str, call_id: str | None = None) -> None:
        self.began = True
        self._cursor.let_go()
        self._pieces.append(CallBegins(call_id, name))

    def arguments(self, text: str) -> None:
        if text:
            self._pieces.append(Arguments(text))


_TOOL_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)')


class CallReader(CursorReader):
    """Reads calls in one format; all other text passes through. `must_call`: a grammar allows nothing but calls, so there
    is no other text, only marks around calls that were cut off."""

    def __init__(self, calls: CallFormat, tools: ToolSchemas, *, must_call: bool = False) -> None:
        super().__init__()
        self._must_call = must_call
        self._calls = calls
        self._tools = tools
        # White space around calls, until it is known what follows. None: text has begun.
        self._space: str | None = ""
        self._found = False

    def finish(self, *, cut: bool = False) -> list[Piece]:
        pieces = super().finish(cut=cut)
        if self._space and not self._found and not self._must_call:
            pieces.append(Text(self._space))
        self._space = None
        return pieces

    def _read(self) -> Steps[None]:
        cursor, calls = self._cursor, self._calls
        if calls.opening is not None:
            while not cursor.rest.strip() and not cursor.ended:
                yield
            if cursor.rest.lstrip().startswith(calls.opening):
                yield from self._read_calls("")
        while (mark := (yield from self._next_mark())) is not None:
            yield from self._read_calls(mark)

    def _next_mark(self) -> Steps[str | None]:
        # After a call the first character of a mark is one, because the next call is what mostly follows.
        least = 1 if self._found else UNAMBIGUOUS
        return (yield from self._cursor.until(self._calls.begins, self._say, least))

    def _read_calls(self, mark: str) -> Steps[None]:
        """Reads the calls after a mark. White space around them belongs to the format; a mark without a call
        is text."""
        cursor = self._cursor
        cursor.keep()
        sink = CallSink(cursor, self._pieces)
        yield from self._calls.read(cursor, sink, self._tools)
        if sink.began:
            self._space, self._found = "", True
            if cursor.cut and _may_be_calls(cursor.rest):
                cursor.rest = ""
            return
        cursor.give_back()
        if cursor.cut and (_may_be_calls(cursor.rest) if mark else self._names_a_tool(cursor.rest)):
            cursor.rest = ""
        elif mark:
            self._say(mark)

    def _names_a_tool(self, text: str) -> bool:
        """Whether an object without a mark is certainly the beginning of a call."""
        named = _TOOL_NAMED.match(text)
        return named is not None and any(tool.startswith(named[1]) for tool in self._tools)

    def _say(self, text: str) -> None:
        if self._must_call:
            return
        if self._space is not None:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._space = None
        self._pieces.append(Text(text))


def _may_be_calls(text: str) -> bool:
    """Whether text after a mark or a call may be the beginning of more of them: a bracket, or a word that has not ended. Prose has
    several words."""
    text = text.strip(" \t\r\n,;")
    return not text or text[0] in "{[<]}" or not any(map(str.isspace, text))
