"""Reads and writes calls as a name followed by an object of arguments: weather<mark>{"city": "Paris"}."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tandem.api.formats.calls import CallSink, Layout
from tandem.api.formats.cursor import MOST_HELD, Cursor, Steps
from tandem.api.formats.json_calls import JsonCalls
from tandem.api.formats.json_scan import JsonScan
from tandem.api.lark import LarkWriter, json_schema
from tandem.api.pieces import ToolSchemas


class NamedCalls(msgspec.Struct, frozen=True):
    begins: tuple[str, ...]
    layout: Layout
    # a regular expression for what precedes the arguments, with the group name and perhaps the group id
    head: str
    written_head: str  # the same, for writing; {} is the name
    call_begin: str = ""
    call_end: str = ""
    end: str = ""
    opening: str | None = None
    instead: JsonCalls | None = None  # how other models of the family write calls after the same mark
    writes_instead: bool = False

    def read(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas) -> Steps[None]:
        if self.instead is not None:
            yield from cursor.skip_space()
            if cursor.rest.startswith(("[", "{")) and not cursor.rest.startswith("[ARGS]"):
                yield from self.instead.read(cursor, sink, tools)
                return
        while (yield from self._read_call(cursor, sink)):
            if not self.call_begin:
                return
            yield from cursor.skip_space()
            if (yield from cursor.starts_with(self.end)):
                cursor.take(len(self.end))
                return

    def _read_call(self, cursor: Cursor, sink: CallSink) -> Steps[bool]:
        if self.call_begin:
            yield from cursor.skip_space()
            if not (yield from cursor.starts_with(self.call_begin)):
                return False
        while (at := cursor.rest.find("{")) < 0:
            if cursor.ended or len(cursor.rest) > MOST_HELD:
                return False
            yield
        found = re.fullmatch(self.head, cursor.rest[len(self.call_begin) : at])
        if found is None:
            return False
        cursor.take(at)
        sink.call(found["name"], found.groupdict().get("id"))
        scan = JsonScan()
        while (end := scan.until(cursor.rest, 0, 0)) is None:
            sink.arguments(cursor.take(len(cursor.rest)))
            if cursor.ended:
                return False
            yield
        sink.arguments(cursor.take(end))
        if not self.call_end:
            return True
        return (yield from cursor.until((self.call_end,), lambda _: None)) is not None

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        if self.instead is not None and self.writes_instead:
            return self.instead.rules(rule, name, schema, writer, lenient=lenient)
        return [
            f"{rule}: {writer.literal(self.written_head.format(name))} {rule}_a",
            f"{rule}_a: %json {json_schema(schema, lenient=lenient)}",
        ]
