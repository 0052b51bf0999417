"""Reads and writes Gemma's calls: call:weather{city:<escape>Paris<escape>,days:2}."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tandem.api.formats.argument_lists import ArgumentScan, list_rules
from tandem.api.formats.calls import CallSink, Layout
from tandem.api.formats.cursor import Cursor, Steps
from tandem.api.formats.json_scan import json_text
from tandem.api.formats.typed_values import as_json, escaped, is_text, json_rule, properties_of, value_schema
from tandem.api.lark import LarkWriter
from tandem.api.pieces import ToolSchemas

_CALL = re.compile(r"\s*call:([\w.\-]+)\{")
_MAY_BE_CALL = re.compile(r"\s*(?:c|ca|cal|call|call:[\w.\-]*)?")
_KEY = re.compile(r"\s*([^\s:,{}]+)\s*:")


class BracedCalls(msgspec.Struct, frozen=True):
    begins: tuple[str, ...]
    layout: Layout
    end: str
    quote: str  # on both sides of a text
    opening: str | None = None

    def read(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas) -> Steps[None]:
        found = yield from cursor.match(_CALL, _MAY_BE_CALL)
        if found is None:
            return
        sink.call(found.group(1))
        yield from self._read_arguments(cursor, sink)
        yield from cursor.skip_space()
        if (yield from cursor.starts_with(self.end)):
            cursor.take(len(self.end))

    def _read_arguments(self, cursor: Cursor, sink: CallSink) -> Steps[None]:
        before = "{"
        while True:
            key = yield from cursor.match(_KEY, re.compile(r"\s*[^\s:,{}]*\s*"))
            if key is None:
                break
            sink.arguments(f"{before}{json_text(key.group(1))}: ")
            before = ", "
            yield from cursor.skip_space()
            if (yield from cursor.starts_with(self.quote)):
                cursor.take(len(self.quote))
                sink.arguments('"')
                yield from cursor.until((self.quote,), lambda text: sink.arguments(escaped(text)))
                sink.arguments('"')
            else:
                scan = ArgumentScan((self.quote,), "}", escapes=False)
                while (end := scan.find(cursor.rest, ended=cursor.ended)) is None and not cursor.ended:
                    yield
                sink.arguments(self._json(cursor.take(len(cursor.rest) if end is None else end)))
            yield from cursor.skip_space()
            if not (yield from cursor.starts_with(",")):
                break
            cursor.take(1)
        sink.arguments("{}" if before == "{" else "}")
        yield from cursor.skip_space()
        if (yield from cursor.starts_with("}")):
            cursor.take(1)

    def _json(self, written: str) -> str:
        """Converts an array, an object with bare keys, a number or a word, whose texts are between quotes, to
        JSON."""
        parts = written.split(self.quote)
        for at in range(1, len(parts), 2):
            parts[at] = json_text(parts[at])
        for at in range(0, len(parts), 2):
            parts[at] = re.sub(r'([{,]\s*)([^\s:,{}\[\]"]+)\s*:', lambda m: f"{m[1]}{json_text(m[2])}:", parts[at])
        return as_json("".join(parts))

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        items: list[tuple[str, bool]] = []
        values: list[str] = []
        for at, (key, declared, required) in enumerate(properties_of(schema)):
            items.append((f"{writer.literal(key + ':')} {rule}_v{at}", required))
            if not is_text(declared):
                values.append(f"{rule}_v{at}: {json_rule(value_schema(declared, schema), lenient=lenient)}")
            elif choices := declared.get("enum"):
                texts = (writer.literal(f"{self.quote}{choice}{self.quote}") for choice in choices)
                values.append(f"{rule}_v{at}: {' | '.join(texts)}")
            else:
                values.append(f"{rule}_v{at}: {writer.literal(self.quote)} {rule}_t{at}")
                values.append(writer.text_until(f"{rule}_t{at}", self.quote))
        return [
            f'{rule}: {writer.literal(f"call:{name}" + "{")} {rule}_f0 "}}"',
            *list_rules(rule, items, '","'),
            *values,
        ]
