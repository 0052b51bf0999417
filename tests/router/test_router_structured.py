"""Answers in a form that the client asks for: what nodes are told, and what is refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.api.settings import ToolFormat
from tandem.api.text.tokenizer import Tokenizer
from tandem.router.config import Heartbeat
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_node import scripted
from tests.small_model import WEATHER

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
WRITTEN_WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
WRITTEN_NOW = '{"name": "now", "arguments": {}}'


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": True}}


class Follows:
    """Reads texts as the nodes would, by the grammar that the last request brought."""

    def __init__(self, router: RunningRouter, folder: str) -> None:
        text = (Path(folder) / "tokenizer.json").read_text()
        self._tokenizer = LLTokenizer(text, eos_token=1)
        self._router = router

    @property
    def grammars(self) -> set[str | None]:
        nodes = self._router.nodes.values()
        return {node.submits[-1].sampling.grammar for node in nodes if node.submits}

    def __call__(self, text: str) -> bool:
        (grammar,) = self.grammars
        assert grammar is not None
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    return start_router()


@pytest.fixture
def follows(router: RunningRouter, model_folder: str) -> Follows:
    return Follows(router, model_folder)


def test_a_schema_reaches_both_nodes_as_the_same_grammar(router: RunningRouter, follows: Follows) -> None:
    assert router.chat(response_format=format_of(PERSON), max_tokens=3).status_code == 200
    assert len(router.nodes["p0"].submits) == len(router.nodes["d0"].submits) == 1
    assert follows('{"name": "Bob", "age": 7}')
    assert follows('{\n  "name": "Bob",\n  "age": 7\n}')
    assert not follows('{"name": "Bob"}')
    assert not follows('{"name": "Bob", "age": 7, "x": 1}')
    assert not follows("Bob is 7.")


def test_white_space_is_bounded(router: RunningRouter, follows: Follows) -> None:
    router.chat(response_format={"type": "json_object"}, max_tokens=3)
    assert follows('{"a":' + " " * 40 + "1}")
    assert not follows('{"a":' + " " * 41 + "1}")


def test_a_client_does_not_set_the_grammar_librarys_options(router: RunningRouter, follows: Follows) -> None:
    own = {**PERSON, "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}}
    router.chat(response_format=format_of(own), max_tokens=3)
    assert not follows('{xx"name":"Bob","age":7}')
    refused = router.chat(response_format=format_of({**own, "not": {}}))
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": PERSON}, '{"name":"x","age":1}', "{}"),
        ({"regex": r"a/b\d{2}"}, "a/b42", "a/b4"),
        ({"choice": ["yes", 'n"o']}, 'n"o', "maybe"),
        ({"grammar": 'start: "a" rest\nrest: /[0-9]+/'}, "a17", "17"),
    ],
)
def test_other_forms(
    router: RunningRouter, follows: Follows, wanted: dict[str, Any], good: str, bad: str
) -> None:
    assert router.complete(structured_outputs=wanted, max_tokens=3).status_code == 200
    assert follows(good)
    assert not follows(bad)


def test_without_one_there_is_none(router: RunningRouter, follows: Follows) -> None:
    router.chat(max_tokens=3)
    assert follows.grammars == {None}
    router.chat(response_format={"type": "text"}, max_tokens=3)
    assert follows.grammars == {None}


def test_what_is_wrong_with_a_schema_is_said(router: RunningRouter) -> None:
    error = router.chat(
        response_format=format_of({"type": "array", "items": {}, "uniqueItems": True})
    ).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in error["message"]
    pattern = router.chat(response_format=format_of({"type": "string", "pattern": "("})).json()["error"]
    assert "unclosed group" in pattern["message"]
    assert "%json" not in pattern["message"]


def test_the_official_clients_parsing_works_unchanged(
    start_router: StartRouter, tokenizer: Tokenizer, end_token: int
) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int
        tags: list[str] | None

    script = [*tokenizer.encode('{"name": "Bob", "age": 7, "tags": null}', special=False), end_token]
    # The client's first parse imports and builds much, in the process of the nodes that must not be taken for silent.
    router = start_router(rule=scripted(script), heartbeat=Heartbeat(ping_interval=0.1, silence=5))
    client = router.official_client()
    answer = client.chat.completions.parse(
        model="fake", messages=[{"role": "user", "content": "who?"}], response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Bob", age=7, tags=None)


class TestTools:
    @pytest.fixture
    def router(self, start_router: StartRouter, folder_with_tools: str) -> RunningRouter:
        return start_router(tokenizer_path=folder_with_tools)

    def ask(self, router: RunningRouter, **fields: Any) -> None:
        answer = router.chat(tools=[WEATHER, NOW], max_tokens=3, **fields)
        assert answer.status_code == 200, answer.text

    def test_required_is_one_call_or_several_and_nothing_else(
        self, router: RunningRouter, follows: Follows
    ) -> None:
        self.ask(router, tool_choice="required")
        weather = f"<tool_call>\n{WRITTEN_WEATHER}\n</tool_call>"
        now = f"<tool_call>\n{WRITTEN_NOW}\n</tool_call>"
        assert follows(weather)
        assert follows(f"{weather}\n{now}\n{weather}")
        assert not follows("It is sunny.")
        assert not follows(f"I look. {weather}")
        assert not follows(weather.replace("weather", "whether"))
        assert not follows(weather.replace('"Paris"', "5"))

    def test_without_parallel_calls_one_is_enough(self, router: RunningRouter, follows: Follows) -> None:
        self.ask(router, tool_choice="required", parallel_tool_calls=False)
        now = f"<tool_call>\n{WRITTEN_NOW}\n</tool_call>"
        assert follows(now)
        assert not follows(f"{now}\n{now}")

    def test_a_named_function_is_the_only_one(self, router: RunningRouter, follows: Follows) -> None:
        self.ask(router, tool_choice={"type": "function", "function": {"name": "now"}})
        assert follows(f"<tool_call>\n{WRITTEN_NOW}\n</tool_call>")
        assert not follows(f"<tool_call>\n{WRITTEN_WEATHER}\n</tool_call>")

    def test_auto_leaves_the_model_its_choice(self, router: RunningRouter, follows: Follows) -> None:
        self.ask(router, tool_choice="auto")
        assert follows.grammars == {None}
        self.ask(router, response_format=format_of(PERSON))
        assert follows('{"name": "Bob", "age": 7}')
        assert follows(f"<tool_call>\n{WRITTEN_NOW}\n</tool_call>")
        assert not follows("It is sunny.")
        self.ask(router, response_format=format_of(PERSON), tool_choice="none")
        assert follows('{"name": "Bob", "age": 7}')
        assert not follows(f"<tool_call>\n{WRITTEN_NOW}\n</tool_call>")

    def test_under_auto_a_strict_function_holds_from_where_a_call_begins(
        self, router: RunningRouter, follows: Follows
    ) -> None:
        tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, NOW]
        weather = f"<tool_call>\n{WRITTEN_WEATHER}\n</tool_call>"
        now = f"<tool_call>\n{WRITTEN_NOW}\n</tool_call>"
        assert router.chat(tools=tools, max_tokens=3).status_code == 200
        for text in ("", "It is sunny.", 'A <tool, {"name": 1}', weather, f"I look. {weather}\n{now}\nSo!"):
            assert follows(text), text
        for text in ("<tool_call>", weather[:-1], weather.replace("weather", "whether")):
            assert not follows(text), text
        assert not follows(weather.replace('"Paris"', "5"))
        assert not follows(f"{weather} And <tool_call> is how I call.")
        assert router.chat(tools=tools, parallel_tool_calls=False, max_tokens=3).status_code == 200
        assert follows(f"I look. {weather}")
        assert not follows(f"{weather}\n{now}")

    def test_definitions_inside_parameters_keep_their_meaning(
        self, router: RunningRouter, follows: Follows
    ) -> None:
        parameters = {
            "properties": {"day": {"$ref": "#/$defs/day"}},
            "required": ["day"],
            "$defs": {"day": {"enum": ["mon", "tue"]}},
        }
        tool = {"type": "function", "function": {"name": "open", "parameters": parameters}}
        assert router.chat(tools=[tool], tool_choice="required", max_tokens=3).status_code == 200
        assert follows('<tool_call>\n{"name": "open", "arguments": {"day": "tue"}}\n</tool_call>')
        assert not follows('<tool_call>\n{"name": "open", "arguments": {"day": "sun"}}\n</tool_call>')

    @pytest.mark.parametrize("strict", [True, False])
    def test_only_a_strict_function_is_refused_for_what_cannot_be_enforced(
        self, router: RunningRouter, strict: bool
    ) -> None:
        parameters = {"properties": {"days": {"type": "array", "uniqueItems": True}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        answer = router.chat(tools=[tool], tool_choice="required", max_tokens=3)
        assert answer.status_code == (400 if strict else 200)
        if strict:
            assert answer.json()["error"]["param"] == "tools"
            assert "uniqueItems" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            (
                {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
                "tool_choice.function.name",
            ),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ],
    )
    def test_contradictions_are_refused(
        self, router: RunningRouter, fields: dict[str, Any], param: str
    ) -> None:
        answer = router.chat(tools=[NOW], **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("tool_format", "good", "bad"),
    [
        (
            ToolFormat.LLAMA3,
            [
                "It is late, {now}.",
                '{"name": "now", "parameters": {}}',
                'Look: <|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
            ],
            ['{"name": "then", "parameters": {}}', ' {"a": 1}', '<|python_tag|>print("now")'],
        ),
        (
            ToolFormat.MISTRAL,
            ["[1]", f"[TOOL_CALLS][{WRITTEN_NOW}]", f"Look: [TOOL_CALLS][{WRITTEN_NOW}, {WRITTEN_NOW}]"],
            [
                "[TOOL_CALLS]",
                "[TOOL_CALLS][]",
                f"[TOOL_CALLS][{WRITTEN_NOW}] So!",
                f"[TOOL_CALLS]{WRITTEN_NOW}",
            ],
        ),
    ],
)
def test_under_auto_each_format_is_held_to_strict_functions(
    start_router: StartRouter,
    folder_with_tools: str,
    tool_format: ToolFormat,
    good: list[str],
    bad: list[str],
) -> None:
    router = start_router(tokenizer_path=folder_with_tools, tool_format=tool_format)
    tool = {
        "type": "function",
        "function": {"name": "now", "strict": True, "parameters": {"additionalProperties": False}},
    }
    assert router.chat(tools=[tool], max_tokens=3).status_code == 200
    follows = Follows(router, folder_with_tools)
    assert [text for text in good if not follows(text)] == []
    assert [text for text in bad if follows(text)] == []


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (ToolFormat.LLAMA3, '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'),
        (ToolFormat.MISTRAL, f"[TOOL_CALLS][{WRITTEN_NOW}, {WRITTEN_WEATHER}]"),
    ],
)
def test_each_format_is_made_to_write_what_its_reader_reads(
    start_router: StartRouter,
    folder_with_tools: str,
    tokenizer: Tokenizer,
    end_token: int,
    tool_format: ToolFormat,
    text: str,
) -> None:
    router = start_router(
        rule=scripted([*tokenizer.encode(text, special=False), end_token]),
        tokenizer_path=folder_with_tools,
        tool_format=tool_format,
    )
    answer = router.chat(tools=[WEATHER, NOW], tool_choice="required").json()["choices"][0]
    assert Follows(router, folder_with_tools)(text)
    assert answer["finish_reason"] == "tool_calls"
    assert len(answer["message"]["tool_calls"]) == 2
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {}
