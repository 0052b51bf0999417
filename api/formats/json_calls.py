"""Reads and writes calls as JSON objects: {"name": "weather", "arguments": {"city": "Paris"}}."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.api.formats.calls import CallSink, Layout
from tandem.api.formats.cursor import Cursor, Steps
from tandem.api.formats.json_scan import EndSearch, JsonScan, json_text, values_in
from tandem.api.lark import LarkWriter, json_schema, quoted
from tandem.api.pieces import ToolSchemas

# The beginning of such an object, with name and arguments in the order that models are taught.
_HEAD = re.compile(r'[\s,;\[]*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# What calls in any order of their members begin with, as far as it has come.
_MAY_BE_CALLS = re.compile(r'[\s,;\[]*(?:\Z|\{\s*(?:["}]|\Z))')
_BETWEEN = " \t\r\n,;[]"


class JsonCalls(msgspec.Struct, frozen=True):
    begins: tuple[str, ...]
    layout: Layout
    end: str | None = None  # None: calls go on to the answer's end
    key: str = "arguments"  # the key for writing arguments; the other one is read, too
    opening: str | None = None

    def read(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas) -> Steps[None]:
        """Reads calls. A call is told once its arguments begin. An object that begins in another way is held
        to its end."""
        search = EndSearch(self.end) if self.end is not None else None
        while (head := _HEAD.match(cursor.rest)) is None:
            if _MAY_BE_CALLS.match(cursor.rest) is None:
                return
            at = search.find(cursor.rest) if search is not None else -1
            if at >= 0 or cursor.ended:
                _tell_whole(cursor, sink, cursor.rest if at < 0 else cursor.rest[:at], self.end if at >= 0 else "")
                return
            yield
        while head is not None:
            cursor.take(head.end())
            sink.call(head.group(1))
            yield from _read_object(cursor, sink)
            head = yield from self._next(cursor)

    def _next(self, cursor: Cursor) -> Steps[re.Match[str] | None]:
        """Waits for another call, the end mark, or the answer's end. Text before the end mark is dropped."""
        while (head := _HEAD.match(cursor.rest)) is None:
            at = cursor.rest.find(self.end) if self.end is not None else -1
            if at >= 0 and self.end is not None:
                cursor.take(at + len(self.end))
                return None
            if cursor.ended:
                cursor.rest = cursor.rest.strip(_BETWEEN)
                return None
            yield
        return head

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        head = f'{{"name": {quoted(name)}, "{self.key}": '
        return [f'{rule}: {quoted(head)} {rule}_a "}}"', f"{rule}_a: %json {json_schema(schema, lenient=lenient)}"]


def _read_object(cursor: Cursor, sink: CallSink) -> Steps[None]:
    """Reads the arguments and the rest of the object around them."""
    scan = JsonScan(depth=1)
    while (end := scan.until(cursor.rest, 0, 1)) is None:
        sink.arguments(cursor.take(len(cursor.rest)))
        if cursor.ended:
            return
        yield
    sink.arguments(cursor.take(end))
    while (end := scan.until(cursor.rest, 0, 0)) is None:
        cursor.take(len(cursor.rest))
        if cursor.ended:
            return
        yield
    cursor.take(end)


def _tell_whole(cursor: Cursor, sink: CallSink, inner: str, end: str | None) -> None:
    calls = _calls_in(inner.strip())
    if calls is None:
        return
    cursor.take(len(inner) + len(end or ""))
    for name, arguments in calls:
        sink.call(name)
        sink.arguments(arguments)


def _calls_in(text: str) -> list[tuple[str, str]] | None:
    """Returns the calls of one object, a list, or several objects in a row; None when the text is no call."""
    values = values_in(text)
    if values is None:
        return None
    return _all_calls(values[0] if len(values) == 1 and isinstance(values[0], list) else values)


def _all_calls(values: Iterable[Any]) -> list[tuple[str, str]] | None:
    calls: list[tuple[str, str]] = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        calls.append((value["name"], arguments if isinstance(arguments, str) else json_text(arguments)))
    return calls or None
