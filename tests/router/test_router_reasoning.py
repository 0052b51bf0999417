"""What a model thinks before it answers: told apart while it comes, counted, and left alone by grammars."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from tandem.api.text.tokenizer import Tokenizer
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.paths import of_served
from tests.small_model import HERMES, PARIS, SAID, THOUGHT, WEATHER


def test_reasoning_and_a_call_whole_and_streamed(
    start_saying: StartRouter, thinking_folder: str, tokenizer: Tokenizer
) -> None:
    text = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{HERMES}"
    router = start_saying(text, tokenizer_path=thinking_folder)
    client = router.official_client()
    messages: Any = [{"role": "user", "content": "weather?"}]
    options: Any = {"model": "fake", "messages": messages, "tools": [WEATHER], "max_tokens": 500}

    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == THOUGHT
    assert (message.content or "").strip() == SAID
    assert message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    reasoning_tokens = whole.usage.completion_tokens_details.reasoning_tokens or 0
    counted = len(tokenizer.encode(f"<think>\n{THOUGHT}\n</think>", special=False))
    assert abs(reasoning_tokens - counted) <= 1
    assert reasoning_tokens < whole.usage.completion_tokens

    with client.chat.completions.create(**options, stream=True) as stream:
        deltas = [part.choices[0].delta for part in stream]
    thoughts = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
    assert "".join(filter(None, thoughts)) == THOUGHT
    assert len(list(filter(None, thoughts))) > 3
    assert "".join(delta.content or "" for delta in deltas).strip() == SAID
    calls = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
    assert calls[0].name == "weather"
    assert json.loads("".join(call.arguments or "" for call in calls)) == PARIS[1]

    without = client.chat.completions.create(**options, extra_body={"include_reasoning": False})
    assert "reasoning_content" not in (without.choices[0].message.model_extra or {})


def test_usage_in_every_event_counts_reasoning_at_the_end_alone(
    start_saying: StartRouter, thinking_folder: str
) -> None:
    """To count it, all tokens so far are looked at, which must not be done with each of them."""
    router = start_saying(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}", tokenizer_path=thinking_folder)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = router.chat(stream=True, stream_options=options, max_tokens=500).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    *during, last = [event["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in during]
    assert counts == sorted(counts)
    assert not any("completion_tokens_details" in usage for usage in during)
    assert 0 < last["completion_tokens_details"]["reasoning_tokens"] < last["completion_tokens"] == counts[-1]


def test_a_message_that_is_only_reasoning(start_saying: StartRouter, thinking_folder: str) -> None:
    router = start_saying("<think>" + "hm " * 50, tokenizer_path=thinking_folder)
    answer = router.chat(max_tokens=20).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"].startswith("hm")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}


def test_a_request_turns_thinking_off(start_saying: StartRouter, thinking_folder: str) -> None:
    router = start_saying("<think>hm</think>so", tokenizer_path=thinking_folder)
    for fields, closed in (
        ({}, False),
        ({"enable_thinking": False}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, False),
    ):
        message = router.chat(**fields).json()["choices"][0]["message"]
        assert router.prompt.endswith("</think>\n\n") is closed
        assert message["content"] == ("<think>hm</think>so" if closed else "so")
    for fields in ({}, {"enable_thinking": False}):  # a schema waits for the reasoning
        answer = router.chat(response_format={"type": "json_object"}, **fields)
        assert answer.status_code == 200
        grammar = router.nodes["p0"].submits[-1].sampling.grammar or ""
        assert ("</think>" in grammar) is not bool(fields)


Budgeted = tuple[RunningRouter, LLTokenizer, dict[str, int]]


@pytest.fixture(scope="module")
def budgeted(thinking_folder: str, keep_router: StartRouter, tmp_path_factory: pytest.TempPathFactory) -> Budgeted:
    """A router whose model has tokens for the marks of its reasoning."""
    folder = Path(shutil.copytree(thinking_folder, tmp_path_factory.mktemp("budget") / "model"))
    file = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in marks])
    backend.save(str(file))
    ids = {mark: backend.token_to_id(mark) for mark in (*marks, "<|end|>")}
    router = keep_router(tokenizer_path=str(folder))
    return router, LLTokenizer(file.read_text(), eos_token=[ids["<|end|>"]]), ids  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("path", "fields"),
    of_served(
        ("/v1/chat/completions", {"thinking_token_budget": 5}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
        ("/v1/chat/completions", {"thinking_token_budget": 5, "tools": [WEATHER]}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ),
)
def test_reasoning_ends_when_its_budget_is_spent(budgeted: Budgeted, path: str, fields: dict[str, Any]) -> None:
    router, backend, marks = budgeted
    hi = [{"role": "user", "content": "hi"}]
    assert router.ask(path, messages=hi, max_tokens=50, **fields).status_code == 200
    grammar = router.nodes["p0"].submits[-1].sampling.grammar

    def taken(ids: list[int]) -> int:
        matcher = LLMatcher(backend, LLMatcher.grammar_from_lark(grammar or ""), log_level=0)
        return int(matcher.try_consume_tokens(ids))

    (letter,) = backend.tokenize_str("x")
    begin, end = [marks["<think>"]], [marks["</think>"]]
    assert taken([*begin, *[letter] * 9]) == 1 + 5, "nothing but the end mark follows the fifth token"
    assert taken([*begin, *[letter] * 5, *end, *[letter] * 20]) == 1 + 5 + 1 + 20
    assert taken([*begin, letter, *end, letter, marks["<|end|>"]]) == 5, "it may end sooner"


def test_a_budget_asks_for_nothing_where_there_is_no_reasoning_or_less_room(budgeted: Budgeted) -> None:
    router, _, _ = budgeted
    for fields in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"thinking_token_budget": 4000}):
        assert router.chat(max_tokens=4, **{"thinking_token_budget": 2, **fields}).status_code == 200
        assert router.nodes["p0"].submits[-1].sampling.grammar is None
    for contradiction in (
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
        {"thinking_token_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
    ):
        assert router.chat(max_tokens=40, **contradiction).status_code == 400


def test_a_budget_is_refused_where_no_token_ends_reasoning(start_router: StartRouter, thinking_folder: str) -> None:
    answer = start_router(tokenizer_path=thinking_folder).chat(thinking_token_budget=5, max_tokens=40)
    assert error_of(answer, 400)["param"] == "thinking_token_budget"
    assert "a token of its own" in answer.json()["error"]["message"]
