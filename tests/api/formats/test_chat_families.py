"""Chat templates in the manner of many families: rendered as transformers renders them, and their formats found."""

from __future__ import annotations

import json
from functools import cache
from itertools import takewhile
from typing import Any

import pytest

from tandem.api.formats.detection import detected_calls, format_of
from tandem.api.formats.harmony import HarmonyCalls
from tandem.api.formats.registry import CALLS, MENTIONED, REASONING
from tandem.api.settings import ReasoningName, ToolFormat
from tandem.api.text.chat_template import ChatTemplate
from tandem.base.errors import InvalidRequest
from tests.api.formats.reading import Told, read, told
from tests.small_model import TEMPLATES

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

FAMILIES: dict[str, tuple[ToolFormat, ReasoningName]] = {
    "chatml": (ToolFormat.HERMES, ReasoningName.NONE),
    "deepseek_v3": (ToolFormat.DEEPSEEK_V3, ReasoningName.THINK),
    "deepseek_v31": (ToolFormat.DEEPSEEK_V31, ReasoningName.THINK),
    "function_gemma": (ToolFormat.FUNCTION_GEMMA, ReasoningName.NONE),
    "gemma2": (ToolFormat.HERMES, ReasoningName.NONE),
    "gemma3": (ToolFormat.HERMES, ReasoningName.NONE),
    "gemma4": (ToolFormat.GEMMA4, ReasoningName.GEMMA4),
    "glm": (ToolFormat.GLM, ReasoningName.THINK),
    "gpt_oss": (ToolFormat.HARMONY, ReasoningName.HARMONY),
    "granite3": (ToolFormat.GRANITE, ReasoningName.GRANITE),
    "hermes": (ToolFormat.HERMES, ReasoningName.NONE),
    "kimi_k2": (ToolFormat.KIMI_K2, ReasoningName.THINK),
    "lfm2": (ToolFormat.LFM2, ReasoningName.NONE),
    "llama3": (ToolFormat.LLAMA3, ReasoningName.NONE),
    "llama4": (ToolFormat.PYTHONIC, ReasoningName.NONE),
    "minimax": (ToolFormat.MINIMAX, ReasoningName.THINK),
    "minimax_m1": (ToolFormat.MINIMAX_M1, ReasoningName.NONE),
    "mistral": (ToolFormat.MISTRAL, ReasoningName.NONE),
    "mistral_named": (ToolFormat.MISTRAL_NAMED, ReasoningName.MISTRAL),
    "olmo3": (ToolFormat.OLMO3, ReasoningName.NONE),
    "phi4": (ToolFormat.PHI4, ReasoningName.NONE),
    "qwen3": (ToolFormat.HERMES, ReasoningName.THINK),
    "qwen3_coder": (ToolFormat.QWEN3_CODER, ReasoningName.NONE),
    "seed_oss": (ToolFormat.SEED_OSS, ReasoningName.SEED_THINK),
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather in a town – as <b>it</b> is",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Is it Oslo?",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
        }
    ],
}
USER = {"role": "user", "content": 'What of "Oslo" & <Þórshöfn>?'}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([USER], {}),
    "a system message": (
        [{"role": "system", "content": " Be brief.\n"}, USER, {"role": "assistant", "content": "Rain.\n"}, USER],
        {},
    ),
    "a call": ([USER, CALLED], {"tools": [WEATHER], "add_generation_prompt": False}),
    "a call's result": (
        [USER, CALLED, {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"rain": true}'}],
        {"tools": [WEATHER]},
    ),
    "no thinking": (
        [USER],
        {"tools": [WEATHER], "extra": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}},
    ),
    "thinking": ([USER], {"extra": {"enable_thinking": True, "thinking": True}}),
    "an answer to go on with": (
        [USER, {"role": "assistant", "content": "It will be "}],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}


@cache
def family(name: str) -> ChatTemplate:
    return ChatTemplate({"default": (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")}, VARIABLES)


def test_every_template_and_every_format_is_in_a_table() -> None:
    assert sorted(FAMILIES) == sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    assert {name for name, _ in MENTIONED} == {*CALLS, ToolFormat.HARMONY}
    assert {*CALLS, ToolFormat.HARMONY, ToolFormat.AUTO, ToolFormat.NONE} == set(ToolFormat)
    assert {*REASONING, ReasoningName.HARMONY, ReasoningName.AUTO, ReasoningName.NONE} == set(ReasoningName)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_is_rendered_as_transformers_renders_it(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    for chat, (messages, options) in CHATS.items():
        variables = {**VARIABLES, **options.get("extra", {})}
        try:
            (expected,), _ = render_jinja_template(
                [messages],
                chat_template=source,
                tools=options.get("tools"),
                add_generation_prompt=options.get("add_generation_prompt", True),
                continue_final_message=options.get("continue_final_message", False),
                **variables,
            )
        except Exception:  # whatever a template raises
            with pytest.raises(InvalidRequest):
                family(name).render(messages, **options)
        else:
            assert family(name).render(messages, **options) == expected, chat


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formats_are_those_of_the_template(name: str) -> None:
    calls, reasoning = FAMILIES[name]
    assert detected_calls(family(name)) is calls
    found = format_of(ToolFormat.AUTO, ReasoningName.AUTO, family(name))
    if calls is ToolFormat.HARMONY:
        assert found.harmony == HarmonyCalls()
    else:
        assert found.calls == CALLS[calls]
        assert found.reasoning == REASONING.get(reasoning)


TOLD_IN_WORDS = {"chatml", "gemma2", "gemma3"}  # templates that write no calls


def turn_of(name: str) -> tuple[str, str]:
    """A prompt, and the turn that the template writes after it for a model that has reasoned and called a tool."""
    prompt = family(name).render([USER], tools=[WEATHER], extra={"enable_thinking": True, "thinking": True})
    history = family(name).render([USER, CALLED], tools=[WEATHER], add_generation_prompt=False)
    asked, answered = (text.rpartition(USER["content"])[2] for text in (prompt, history))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(asked, answered, strict=False))
    turn = answered[sum(1 for _ in same) :]
    marks = format_of(ToolFormat.AUTO, ReasoningName.AUTO, family(name)).reasoning
    if marks is not None and prompt.rstrip().endswith(marks.begin) and marks.end not in turn:
        # The template leaves thoughts out of the history.
        turn = CALLED["reasoning_content"] + marks.end + turn
    return prompt, turn


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - TOLD_IN_WORDS))
def test_a_turn_that_the_template_writes_is_read_back_however_it_is_cut(name: str) -> None:
    prompt, turn = turn_of(name)
    found = format_of(ToolFormat.AUTO, ReasoningName.AUTO, family(name))

    def told_in(cuts: list[int]) -> Told:
        pieces = read(found.reader(prompt, {"weather": WEATHER["function"]["parameters"]}), turn, cuts)
        whole = told(pieces)
        return whole._replace(reasoning=whole.reasoning.strip())

    whole = told_in([])
    assert whole.reasoning == (CALLED["reasoning_content"] if CALLED["reasoning_content"] in turn else "")
    ((name_of_call, arguments),) = whole.calls
    assert (name_of_call, json.loads(arguments)) == ("weather", {"city": "Oslo", "days": 2})
    assert (CALLED["content"] in whole.text) == (CALLED["content"] in turn)
    for cut in range(1, len(turn)):
        assert told_in([cut]) == whole, (turn[:cut], turn[cut:])
    assert told_in(list(range(1, len(turn)))) == whole


@pytest.mark.parametrize(("name", "marks"), MENTIONED)
def test_a_template_that_shows_no_call_is_known_by_what_it_mentions(name: ToolFormat, marks: tuple[str, ...]) -> None:
    source = "{% if tools %}{% raw %}" + " ".join(marks) + "{% endraw %}{% endif %}{{ messages[0].content }}"
    found = detected_calls(ChatTemplate({"default": source}, {}))
    assert found is name or name in (ToolFormat.PHI4, ToolFormat.LLAMA3, ToolFormat.PYTHONIC)


def test_what_an_operator_names_is_taken() -> None:
    found = format_of(ToolFormat.GLM, ReasoningName.GRANITE, family("hermes"))
    assert (found.calls, found.reasoning) == (CALLS[ToolFormat.GLM], REASONING[ReasoningName.GRANITE])
    found = format_of(ToolFormat.NONE, ReasoningName.NONE, family("qwen3"))
    assert (found.calls, found.reasoning, found.harmony) == (None, None, None)
