"""Reads and writes calls whose parameters are between tags, as plain values:
<parameter=city>Paris</parameter>."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tandem.api.formats.calls import CallSink, Layout
from tandem.api.formats.cursor import Cursor, Steps
from tandem.api.formats.json_scan import json_text
from tandem.api.formats.typed_values import as_json, escaped, is_text, json_rule, properties_of, schema_of, value_schema
from tandem.api.lark import LarkWriter, quoted
from tandem.api.pieces import ToolSchemas


class TaggedCalls(msgspec.Struct, frozen=True):
    begins: tuple[str, ...]
    layout: Layout
    end: str  # ends all calls that one mark begins
    call_open: str  # a regular expression with the group name
    call_close: str  # "" when the end mark closes the only call
    value_open: str  # a regular expression with the group key
    value_close: str
    written_call: str  # {} is the name
    written_value: str  # {} is the key; a second {} says whether the value is text
    written_close: str  # follows a value
    newlines: bool = False  # each value is on its own line
    opening: str | None = None

    def read(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas) -> Steps[None]:
        call_open = re.compile(r"\s*" + self.call_open)
        while True:
            yield from cursor.skip_space()
            if sink.began and (yield from cursor.starts_with(self.end)):
                cursor.take(len(self.end))
                return
            found = yield from cursor.match(call_open)
            if found is None:
                return
            sink.call(found["name"])
            ended = yield from self._read_values(cursor, sink, tools, found["name"])
            sink.arguments("}")
            if ended:
                return

    def _read_values(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas, name: str) -> Steps[bool]:
        """Reads a call's values. Returns True when no further call can follow: after the end mark, or where
        the text is no longer in this format."""
        value_open = re.compile(self.value_open)
        before = "{"
        while True:
            yield from cursor.skip_space()
            for close in (self.call_close, self.end):
                if close and (yield from cursor.starts_with(close)):
                    cursor.take(len(close))
                    sink.arguments("{" if before == "{" else "")
                    return close == self.end
            found = yield from cursor.match(value_open)
            if found is None:
                sink.arguments("{" if before == "{" else "")
                return True
            sink.arguments(f"{before}{json_text(found['key'])}: ")
            before = ", "
            yield from self._read_value(cursor, sink, textual=is_text(schema_of(tools, name, found["key"])))

    def _read_value(self, cursor: Cursor, sink: CallSink, *, textual: bool) -> Steps[None]:
        closes: tuple[str, ...] = (self.value_close,)
        if self.newlines:
            closes = ("\n" + self.value_close, self.value_close)
            if (yield from cursor.starts_with("\n" + self.value_close)):
                pass  # an empty value: its line break belongs to the closing tag
            elif (yield from cursor.starts_with("\n")):
                cursor.take(1)
        if textual:
            sink.arguments('"')
            yield from cursor.until(closes, lambda text: sink.arguments(escaped(text)))
            sink.arguments('"')
            return
        written: list[str] = []
        yield from cursor.until(closes, written.append)
        sink.arguments(as_json("".join(written)))

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        rules: list[str] = []
        values: list[str] = []
        for at, (key, declared, required) in enumerate(properties_of(schema)):
            values.append(f"{rule}_p{at}" + ("" if required else "?"))
            opened = writer.literal(self.written_value.format(key, "true" if is_text(declared) else "false"))
            rules.append(f"{rule}_p{at}: {opened} {rule}_v{at}")
            rules.append(self._value_rule(f"{rule}_v{at}", declared, schema, writer, lenient=lenient))
        close = writer.literal(self.call_close) if self.call_close else ""
        return [f"{rule}: {writer.literal(self.written_call.format(name))} {' '.join(values)} {close}", *rules]

    def _value_rule(
        self, rule: str, declared: dict[str, Any], whole: dict[str, Any], writer: LarkWriter, *, lenient: bool
    ) -> str:
        close = writer.literal(self.written_close)
        if not is_text(declared):
            return f"{rule}: {json_rule(value_schema(declared, whole), lenient=lenient)} {close}"
        if choices := declared.get("enum"):
            return f"{rule}: ({' | '.join(quoted(str(choice)) for choice in choices)}) {close}"
        return writer.text_until(rule, self.written_close)
