from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.formats.calls import CallReader
from tandem.api.formats.pieces import Arguments, CallBegins, Piece, Text
from tandem.api.formats.registry import CALLS
from tandem.api.settings import ToolFormat
from tandem.api.text.tokenizer import Tokenizer
from tests.router.conftest import CHAT_TEMPLATE, StartRouter
from tests.router.fake_node import scripted

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEMPLATE_WITH_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }} write <tool_call>{...}</tool_call>\n{% endif %}"
    + CHAT_TEMPLATE
)


def read(text: str, name: ToolFormat, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, Any]]]:
    reader = CallReader(CALLS[name], {})
    pieces: list[Piece] = []
    edges = [0, *sorted(cuts or []), len(text)]
    for start, end in itertools.pairwise(edges):
        pieces += reader.push(text[start:end])
    pieces += reader.finish()
    written: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            written.append([piece.name, ""])
        elif isinstance(piece, Arguments):
            written[-1][1] += piece.text
    calls = [(name, json.loads(arguments)) for name, arguments in written]
    return "".join(piece.text for piece in pieces if isinstance(piece, Text)), calls


MARKS = '</tool_call> \\"<tool_call>\\" [TOOL_CALLS] }; {'  # in a string of a call
SAYS_MARKS = ("say", {"text": json.loads(f'"{MARKS}"')})
SAID = '{"text": "' + MARKS + '"}'

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("weather", {"city": "Paris"})


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


@given(
    text=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<tool",
                "x",
                " ",
                "\n",
                '{"name": "f"}',
                "{",
                '"',
                "\\",
                '": "',
                '{"name": "',
                HERMES,
            ]
        ),
        max_size=6,
    ).map("".join),
    data=st.data(),
)
def test_calls_do_not_depend_on_how_the_text_is_cut(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(text, ToolFormat.HERMES, cuts) == read(text, ToolFormat.HERMES)


@pytest.fixture
def folder_with_tools(model_folder: str, tmp_path: Path) -> str:
    (tmp_path / "tokenizer.json").write_bytes((Path(model_folder) / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE_WITH_TOOLS)
    return str(tmp_path)


def test_a_call_through_the_official_client(
    start_router: StartRouter, folder_with_tools: str, tokenizer: Tokenizer, end_token: int
) -> None:
    script = [*tokenizer.encode("I look. " + HERMES, special=False), end_token]
    router = start_router(rule=scripted(script), tokenizer_path=folder_with_tools)
    client = router.official_client()
    messages: Any = [{"role": "user", "content": "weather in Paris?"}]
    tools: Any = [WEATHER]

    whole = client.chat.completions.create(model="fake", messages=messages, tools=tools).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look. "
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == PARIS
    prompt = tokenizer.decode(router.nodes["p0"].submits[0].prompt_token_ids)
    assert '"name": "weather"' in prompt
    assert "strict" not in prompt

    with client.chat.completions.create(model="fake", messages=messages, tools=tools, stream=True) as stream:
        deltas = [part.choices[0] for part in stream]
    assert "".join(choice.delta.content or "" for choice in deltas) == "I look. "
    first, *more = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert first.function is not None
    assert (first.index, first.function.name, first.function.arguments) == (0, "weather", "")
    assert first.id
    assert len(more) > 1, "arguments come as they are written"
    assert {(part.index, part.id) for part in more} == {(0, None)}
    arguments = "".join(part.function.arguments or "" for part in more if part.function)
    assert json.loads(arguments) == PARIS[1]
    assert deltas[-1].finish_reason == "tool_calls"

    answered = [*messages, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert (
        client.chat.completions.create(model="fake", messages=answered, tools=tools)
        .choices[0]
        .message.tool_calls
    )


def test_without_tools_or_with_none_of_them_a_call_is_text(
    start_router: StartRouter, folder_with_tools: str, tokenizer: Tokenizer, end_token: int
) -> None:
    script = [*tokenizer.encode(HERMES, special=False), end_token]
    router = start_router(rule=scripted(script), tokenizer_path=folder_with_tools)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = router.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == HERMES
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_cut_answer_shows_no_mark_of_a_call_at_any_length(
    start_router: StartRouter, folder_with_tools: str, tokenizer: Tokenizer, choice: str
) -> None:
    script = tokenizer.encode(HERMES + "\n" + HERMES, special=False)
    router = start_router(rule=scripted(script), tokenizer_path=folder_with_tools)
    for length in range(6, len(script), 5):
        asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": length}
        whole = router.chat(**asked).json()["choices"][0]
        assert whole["finish_reason"] == "length"
        assert not whole["message"]["content"], tokenizer.decode(script[:length])
        streamed = router.chat(**asked, stream=True).text
        assert "tool_call>" not in streamed
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"]
            for line in streamed.splitlines()
            if line[:7] == "data: {"
        ]
        assert not "".join(delta.get("content") or "" for delta in deltas)


def test_a_call_that_was_cut_off_is_not_called_complete(
    start_router: StartRouter, folder_with_tools: str, tokenizer: Tokenizer
) -> None:
    script = tokenizer.encode(HERMES + HERMES, special=False)
    router = start_router(rule=scripted(script), tokenizer_path=folder_with_tools)
    choice = router.chat(tools=[WEATHER], max_tokens=len(script) - 4).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_template_that_knows_no_tools_is_told_of_them_in_words(
    start_router: StartRouter, tokenizer: Tokenizer, end_token: int
) -> None:
    router = start_router(rule=scripted([*tokenizer.encode(HERMES, special=False), end_token]))
    choice = router.chat("weather in Paris?", tools=[WEATHER]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == PARIS[1]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather in Paris?"},
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        {"role": "tool", "tool_call_id": call["id"], "content": "wind"},
    ]
    assert router.client.post("/v1/chat/completions", json={"messages": messages, "tools": [WEATHER]}).json()
    prompt = tokenizer.decode(router.nodes["p0"].submits[-1].prompt_token_ids)
    assert "Be brief." in prompt
    assert '"description": "the weather somewhere"' in prompt
    assert '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|end|>' in prompt
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nwind\n</tool_response>"
    assert f"<|start|>user\n{results}<|end|>" in prompt


def test_a_template_without_system_messages_is_told_in_the_users_first(
    start_router: StartRouter, tokenizer: Tokenizer
) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    router = start_router(chat_template=source)
    assert router.chat("weather?", tools=[WEATHER], tool_choice="required", max_tokens=2).status_code == 200
    prompt = tokenizer.decode(router.nodes["p0"].submits[-1].prompt_token_ids)
    assert prompt.startswith("[user: You may call")
    assert prompt.endswith("weather?]")
    assert "<tool_call>" in (router.nodes["p0"].submits[-1].sampling.grammar or "")
