"""Calls as models of each family write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.api.formats.calls import CallReader
from tandem.api.formats.registry import CALLS
from tandem.api.settings import ToolFormat
from tests.api.formats.reading import read as read_pieces
from tests.api.formats.reading import told
from tests.small_model import HERMES, PARIS


def read(text: str, name: ToolFormat, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, Any]]]:
    found = told(read_pieces(CallReader(CALLS[name], {}), text, cuts or []))
    return found.text, [(name, json.loads(arguments)) for name, arguments in found.calls]


@pytest.mark.parametrize("name", [ToolFormat.HERMES, ToolFormat.MINIMAX_M1, ToolFormat.PHI4, ToolFormat.GRANITE])
@pytest.mark.parametrize("after", ["no", "\n", "{", " {[", '"', "[5"])
def test_a_mark_without_a_call_holds_nothing_back(name: ToolFormat, after: str) -> None:
    reader = CallReader(CALLS[name], {})
    again = f"{CALLS[name].begins[0]}{after}"
    found = [piece for _ in range(4) for piece in reader.push(again)]
    assert told(found).text.startswith(again * 3), "what came before the last mark"


@pytest.mark.parametrize("name", [ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.LLAMA3])
@pytest.mark.parametrize("after", ["", "{", '{"', "["])
def test_a_model_that_writes_nothing_but_marks_is_read_in_time(name: ToolFormat, after: str) -> None:
    text = f"{CALLS[name].begins[0]}{after}" * 1500
    assert read(text, name, list(range(20, len(text), 20))) == (text, [])


MARKS = '</tool_call> \\"<tool_call>\\" [TOOL_CALLS] }; {'  # in a string of a call
SAYS_MARKS = ("say", {"text": json.loads(f'"{MARKS}"')})
SAID = '{"text": "' + MARKS + '"}'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (ToolFormat.HERMES, HERMES, ("", [PARIS])),
        (ToolFormat.HERMES, "Let me see. " + HERMES + "\n" + HERMES, ("Let me see. ", [PARIS, PARIS])),
        (ToolFormat.HERMES, HERMES.removesuffix("</tool_call>"), ("", [PARIS])),
        (ToolFormat.HERMES, '<tool_call>{"name": "now"}</tool_call>', ("", [("now", {})])),
        (ToolFormat.HERMES, "no call, just a < b", ("no call, just a < b", [])),
        (ToolFormat.HERMES, "<tool_call>not json</tool_call> so", ("<tool_call>not json</tool_call> so", [])),
        (ToolFormat.HERMES, "<tool_call>cut off", ("<tool_call>cut off", [])),
        (ToolFormat.HERMES, "<tool_c", ("<tool_c", [])),
        (ToolFormat.LLAMA3, '{"name": "weather", "parameters": {"city": "Paris"}}', ("", [PARIS])),
        (ToolFormat.LLAMA3, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', ("", [PARIS])),
        (ToolFormat.LLAMA3, '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', ("", [("now", {})] * 2)),
        (ToolFormat.LLAMA3, '{"a": 1}', ('{"a": 1}', [])),
        (ToolFormat.LLAMA3, "plain text {", ("plain text {", [])),
        (ToolFormat.MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', ("", [PARIS])),
        (ToolFormat.MISTRAL, '[TOOL_CALLS]weather{"city": "Paris"}', ("", [PARIS])),
        (ToolFormat.MISTRAL, '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}', ("", [("now", {})] * 2)),
        (ToolFormat.MISTRAL, "[TOOL_CALLS] what", ("[TOOL_CALLS] what", [])),
        (ToolFormat.HERMES, '<tool_call>{"name": "say", "arguments": ' + SAID + "}</tool_call>" + HERMES, ("", [SAYS_MARKS, PARIS])),
        (ToolFormat.HERMES, '<tool_call>{"arguments": ' + SAID + ', "name": "say"}</tool_call>\nso', ("\nso", [SAYS_MARKS])),
        (ToolFormat.HERMES, '<tool_call>{"arguments": ' + SAID + ', "name": "say"}', ("", [SAYS_MARKS])),
        (ToolFormat.HERMES, '<tool_call>{"a": "b</tool_call> "so" ' + HERMES, ('<tool_call>{"a": "b</tool_call> "so" ', [PARIS])),
        (ToolFormat.HERMES, '<tool_call>{"a": "b</tool_call> so', ('<tool_call>{"a": "b</tool_call> so', [])),
        (ToolFormat.HERMES, '<tool_call>5" or so</tool_call>' + HERMES, ('<tool_call>5" or so</tool_call>', [PARIS])),
        (ToolFormat.LLAMA3, '{"parameters": ' + SAID + ', "name": "say"}; {"name": "now", "parameters": {}};', ("", [SAYS_MARKS, ("now", {})])),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]say" + SAID + "[TOOL_CALLS]now[ARGS]{}", ("", [SAYS_MARKS, ("now", {})])),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]say[ARGS]" + SAID, ("", [SAYS_MARKS])),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]now{} and {}", (" and {}", [("now", {})])),
    ],
)  # fmt: skip
def test_calls_as_models_write_them(name: ToolFormat, text: str, expected: tuple[str, list[Any]]) -> None:
    assert read(text, name) == expected
    assert read(text, name, list(range(len(text)))) == expected
