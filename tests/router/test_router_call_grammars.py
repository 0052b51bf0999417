"""Calls that a model must make, or must write correctly: what its grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.api.settings import ToolFormat
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.test_router_structured import PERSON, Follows, format_of
from tests.small_model import WEATHER

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
WRITTEN_WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
WRITTEN_NOW = '{"name": "now", "arguments": {}}'


class TestTools:
    @pytest.fixture
    def router(self, start_router: StartRouter, folder_with_tools: str) -> RunningRouter:
        return start_router(tokenizer_path=folder_with_tools)

    @pytest.fixture
    def follows(self, router: RunningRouter, folder_with_tools: str) -> Follows:
        return Follows(router, folder_with_tools)

    def ask(self, router: RunningRouter, **fields: Any) -> None:
        answer = router.chat(tools=[WEATHER, NOW], max_tokens=3, **fields)
        assert answer.status_code == 200, answer.text

    def test_required_is_one_call_or_several_and_nothing_else(self, router: RunningRouter, follows: Follows) -> None:
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

    def test_definitions_inside_parameters_keep_their_meaning(self, router: RunningRouter, follows: Follows) -> None:
        parameters = {
            "properties": {"day": {"$ref": "#/$defs/day"}},
            "required": ["day"],
            "$defs": {"day": {"enum": ["mon", "tue"]}},
        }
        tool = {"type": "function", "function": {"name": "open", "parameters": parameters}}
        assert router.chat(tools=[tool], tool_choice="required", max_tokens=3).status_code == 200
        assert follows('<tool_call>\n{"name": "open", "arguments": {"day": "tue"}}\n</tool_call>')
        assert not follows('<tool_call>\n{"name": "open", "arguments": {"day": "sun"}}\n</tool_call>')

    def test_of_many_functions_the_wrong_one_is_named(self, router: RunningRouter) -> None:
        kinds = ("string", "objekt", "number")
        schemas = [{"type": "object", "properties": {"a": {"type": kind}}} for kind in kinds]
        functions = [{"name": f"f{kind}", "parameters": schema} for kind, schema in zip(kinds, schemas, strict=True)]
        tools = [{"type": "function", "function": function} for function in functions]
        refused = router.chat(tools=tools, tool_choice="required", max_tokens=3)
        assert error_of(refused, 400)["param"] == "tools[1].function.parameters"
        assert "objekt" in refused.json()["error"]["message"]
        wanted = {"type": "function", "function": {"name": "fnumber"}}
        assert router.chat(tools=tools, tool_choice=wanted, max_tokens=3).status_code == 200

    @pytest.mark.parametrize("strict", [True, False])
    def test_only_a_strict_function_is_refused_for_what_cannot_be_enforced(
        self, router: RunningRouter, strict: bool
    ) -> None:
        parameters = {"properties": {"days": {"type": "array", "uniqueItems": True}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        answer = router.chat(tools=[tool], tool_choice="required", max_tokens=3)
        assert answer.status_code == (400 if strict else 200)
        if strict:
            assert answer.json()["error"]["param"] == "tools[0].function.parameters"
            assert "uniqueItems" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ],
    )
    def test_contradictions_are_refused(self, router: RunningRouter, fields: dict[str, Any], param: str) -> None:
        assert error_of(router.chat(tools=[NOW], **fields), 400)["param"] == param


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
            ["[TOOL_CALLS]", "[TOOL_CALLS][]", f"[TOOL_CALLS][{WRITTEN_NOW}] So!", f"[TOOL_CALLS]{WRITTEN_NOW}"],
        ),
    ],
)
def test_under_auto_each_format_is_held_to_strict_functions(
    start_router: StartRouter, folder_with_tools: str, tool_format: ToolFormat, good: list[str], bad: list[str]
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
    start_saying: StartRouter, folder_with_tools: str, tool_format: ToolFormat, text: str
) -> None:
    router = start_saying(text, tokenizer_path=folder_with_tools, tool_format=tool_format)
    answer = router.chat(tools=[WEATHER, NOW], tool_choice="required").json()["choices"][0]
    assert Follows(router, folder_with_tools)(text)
    assert answer["finish_reason"] == "tool_calls"
    assert len(answer["message"]["tool_calls"]) == 2
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {}


@pytest.mark.parametrize("name", [ToolFormat.QWEN3_CODER, ToolFormat.PYTHONIC, ToolFormat.GEMMA4])
def test_definitions_that_every_parameter_would_repeat_are_refused_before_they_are_written(
    start_router: StartRouter, folder_with_tools: str, name: ToolFormat
) -> None:
    """Written first and measured afterwards, these would be a gigabyte."""
    router = start_router(
        prefill=0, node={"max_model_len": 1_000_000}, tokenizer_path=folder_with_tools, tool_format=name
    )
    schema = {
        "type": "object",
        "properties": {f"a{at}": {"$ref": "#/$defs/b"} for at in range(4000)},
        "$defs": {"b": {"type": "integer", "description": "x" * 300_000}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    assert "once for each of the 4000" in error_of(router.chat(tools=[tool], max_tokens=3), 400)["message"]
