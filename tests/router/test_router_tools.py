from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.api.text.tokenizer import Tokenizer
from tests.router.conftest import StartRouter
from tests.small_model import HERMES, PARIS, WEATHER


def test_a_call_through_the_official_client(
    start_saying: StartRouter, folder_with_tools: str, tokenizer: Tokenizer
) -> None:
    router = start_saying("I look. " + HERMES, tokenizer_path=folder_with_tools)
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
    assert client.chat.completions.create(model="fake", messages=answered, tools=tools).choices[0].message.tool_calls


def test_without_tools_or_with_none_of_them_a_call_is_text(start_saying: StartRouter, folder_with_tools: str) -> None:
    router = start_saying(HERMES, tokenizer_path=folder_with_tools)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = router.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == HERMES
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_cut_answer_shows_no_mark_of_a_call_at_any_length(
    start_saying: StartRouter, folder_with_tools: str, tokenizer: Tokenizer, choice: str
) -> None:
    router = start_saying(HERMES + "\n" + HERMES, ends=False, tokenizer_path=folder_with_tools)
    script = tokenizer.encode(HERMES + "\n" + HERMES, special=False)
    for length in range(6, len(script), 29):
        asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": length}
        whole = router.chat(**asked).json()["choices"][0]
        assert whole["finish_reason"] == "length"
        assert not whole["message"]["content"], tokenizer.decode(script[:length])
        streamed = router.chat(**asked, stream=True).text
        assert "tool_call>" not in streamed
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"] for line in streamed.splitlines() if line[:7] == "data: {"
        ]
        assert not "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(("stop", "reason"), [("Par", "stop"), ('"}}', "stop"), ("</tool", "tool_calls")])
def test_a_stop_string_within_a_call_leaves_it_cut_off_and_says_so(
    start_saying: StartRouter, folder_with_tools: str, stop: str, reason: str
) -> None:
    router = start_saying(HERMES, ends=False, tokenizer_path=folder_with_tools)
    asked: dict[str, Any] = {"tools": [WEATHER], "stop": [stop]}
    assert router.chat(**asked).json()["choices"][0]["finish_reason"] == reason
    streamed = router.chat(**asked, stream=True).text
    assert [f'"finish_reason":"{one}"' in streamed for one in ("stop", "tool_calls")] == [
        reason == "stop",
        reason != "stop",
    ]


def test_a_template_that_knows_no_tools_is_told_of_them_in_words(start_saying: StartRouter) -> None:
    router = start_saying(HERMES)
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
    assert router.ask("/v1/chat/completions", messages=messages, tools=[WEATHER]).status_code == 200
    prompt = router.prompt
    assert "Be brief." in prompt
    assert '"description": "the weather somewhere"' in prompt
    assert '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|end|>' in prompt
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nwind\n</tool_response>"
    assert f"<|start|>user\n{results}<|end|>" in prompt


def test_a_template_without_system_messages_is_told_in_the_users_first(start_router: StartRouter) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    router = start_router(chat_template=source)
    assert router.chat("weather?", tools=[WEATHER], tool_choice="required", max_tokens=2).status_code == 200
    assert router.prompt.startswith("[user: You may call")
    assert router.prompt.endswith("weather?]")
    assert "<tool_call>" in (router.nodes["p0"].submits[-1].sampling.grammar or "")
