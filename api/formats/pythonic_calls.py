"""Reads and writes calls as Python expressions: [weather(city="Paris"), now()]."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tandem.api.formats.argument_lists import ArgumentScan, list_rules
from tandem.api.formats.calls import CallSink, Layout
from tandem.api.formats.cursor import Cursor, Steps
from tandem.api.formats.json_scan import json_text
from tandem.api.formats.typed_values import as_json, json_rule, properties_of, value_schema
from tandem.api.lark import LarkWriter, quoted
from tandem.api.pieces import ToolSchemas

_CALL = re.compile(r"[\s,\[;]*([A-Za-z_][\w.\-]*)\(")
_MAY_BE_CALL = re.compile(r"[\s,\[;]*(?:[A-Za-z_][\w.\-]*)?")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")


class PythonicCalls(msgspec.Struct, frozen=True):
    begins: tuple[str, ...]
    layout: Layout
    end: str = ""
    opening: str | None = None

    def read(self, cursor: Cursor, sink: CallSink, tools: ToolSchemas) -> Steps[None]:
        while (found := (yield from cursor.match(_CALL, _MAY_BE_CALL))) is not None:
            sink.call(found.group(1))
            yield from _read_arguments(cursor, sink)
        if not sink.began:
            return
        yield from cursor.skip_space()
        if (yield from cursor.starts_with("]")):
            cursor.take(1)
        yield from cursor.skip_space()
        if self.end and (yield from cursor.starts_with(self.end)):
            cursor.take(len(self.end))

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        items: list[tuple[str, bool]] = []
        values: list[str] = []
        for at, (key, declared, required) in enumerate(properties_of(schema)):
            items.append((f"{quoted(key + '=')} {rule}_v{at}", required))
            if declared.get("type") == "boolean":
                values.append(f'{rule}_v{at}: "True" | "False"')
            else:
                values.append(f"{rule}_v{at}: {json_rule(value_schema(declared, schema), lenient=lenient)}")
        return [f'{rule}: {quoted(name + "(")} {rule}_f0 ")"', *list_rules(rule, items, '", "'), *values]


def _read_arguments(cursor: Cursor, sink: CallSink) -> Steps[None]:
    """Reads arguments one by one, each when it is complete. An argument without a name gets its position as a
    name."""
    count, closed = 0, False
    while not closed:
        scan = ArgumentScan(('"', "'"), ")", escapes=True)
        while (end := scan.find(cursor.rest, ended=cursor.ended)) is None and not cursor.ended:
            yield
        written = cursor.take(len(cursor.rest) if end is None else end)
        closed = end is None or cursor.take(1) == ")"
        if written.strip():
            found = _KEY.match(written)
            name, value = (found.group(1), written[found.end() :]) if found else (str(count), written)
            sink.arguments(f"{', ' if count else '{'}{json_text(name)}: {as_json(value)}")
            count += 1
    sink.arguments("}" if count else "{}")
