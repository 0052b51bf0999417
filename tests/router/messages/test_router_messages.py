"""Anthropic's API: its own client, unchanged, and the answers and errors that it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tandem.api.text.tokenizer import Tokenizer
from tandem.router.config import ApiKey, Heartbeat
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import scripted
from tests.small_model import HERMES, PARIS, THOUGHT

if TYPE_CHECKING:
    import anthropic

WEATHER: Any = {
    "name": "weather",
    "description": "the weather somewhere",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK: list[Any] = [{"role": "user", "content": "weather in Paris?"}]
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nI look.\n{HERMES}"


def client_of(router: RunningRouter, key: str = "unused") -> anthropic.Anthropic:
    client = pytest.importorskip("anthropic")
    found: anthropic.Anthropic = client.Anthropic(base_url=router.url, api_key=key, max_retries=0)
    return found


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter, thinking_folder: str, tokenizer: Tokenizer, end_token: int) -> RunningRouter:
    script = [*tokenizer.encode(TEXT, special=False), end_token]
    patient = Heartbeat(ping_interval=0.1, silence=5)  # the client's import holds everything up
    return keep_router(rule=scripted(script), tokenizer_path=thinking_folder, heartbeat=patient)


def test_a_tool_loop_through_anthropics_own_client(router: RunningRouter) -> None:
    client = client_of(router)
    answer = client.messages.create(model="fake", max_tokens=500, messages=ASK, tools=[WEATHER], system="Be brief.")
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = answer.content
    assert thinking.type == "thinking"
    assert thinking.thinking == THOUGHT
    assert text.type == "text"
    assert text.text.strip() == "I look."
    assert call.type == "tool_use"
    assert (call.name, call.input) == PARIS
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens > 10
    cached = answer.usage.cache_read_input_tokens or 0
    assert answer.usage.input_tokens + cached == len(router.nodes["p0"].submits[-1].prompt_token_ids)

    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    said: Any = [result, {"type": "text", "text": "and now?"}]
    messages: Any = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": said}]
    client.messages.create(model="fake", max_tokens=500, messages=messages, tools=[WEATHER])
    prompt = router.prompt
    assert '"name": "weather", "arguments": {"city": "Paris"}' in prompt
    assert prompt.index("<tool_response>\nrain") < prompt.index("and now?")

    # A stream is the whole answer in events.
    options: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER], "system": "Be brief."}
    with client.messages.stream(**options, max_tokens=500) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()

    def without_ids(message: Any) -> list[dict[str, Any]]:
        return [{**block.model_dump(), "id": None} for block in message.content]

    assert without_ids(final) == without_ids(answer)
    assert (final.stop_reason, final.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3

    # Tokens are counted without an answer.
    asked = len(router.nodes["p0"].submits)
    counted = client.messages.count_tokens(**options).input_tokens
    assert router.ask("/v1/messages/count_tokens", **options).json()["input_tokens"] == counted
    assert counted == len(router.nodes["p0"].submits[-1].prompt_token_ids)
    assert len(router.nodes["p0"].submits) == asked


def test_tool_choices(router: RunningRouter) -> None:
    for choice, must in (
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "none"}, False),
        ({"type": "auto"}, False),
    ):
        asked = router.ask("/v1/messages", max_tokens=5, messages=ASK, tools=[WEATHER], tool_choice=choice)
        assert asked.status_code == 200
        assert (router.nodes["p0"].submits[-1].sampling.grammar is not None) is must
        assert ("weather somewhere" in router.prompt) is (choice["type"] != "none")


def test_thinking_is_turned_off(router: RunningRouter) -> None:
    for thinking, closed in (({"type": "disabled"}, True), ({"type": "enabled", "budget_tokens": 1024}, False)):
        assert router.ask("/v1/messages", max_tokens=5, messages=ASK, thinking=thinking).status_code == 200
        assert router.prompt.endswith("</think>\n\n") is closed


def test_how_an_answer_ends(start_saying: StartRouter) -> None:
    router = start_saying("one two three")
    body = {"max_tokens": 100, "messages": ASK}
    for fields, text, reason, stop in (
        ({}, "one two three", "end_turn", None),
        ({"max_tokens": 2}, None, "max_tokens", None),
        ({"stop_sequences": ["two"]}, "one ", "stop_sequence", "two"),
    ):
        answer = router.client.post("/v1/messages", json=body | fields).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
        if text is not None:
            assert answer["content"] == [{"type": "text", "text": text}]
    begun = [*ASK, {"role": "assistant", "content": "It will"}]
    assert router.client.post("/v1/messages", json=body | {"messages": begun}).status_code == 200
    assert router.prompt.endswith("It will")


def test_a_refusal_has_anthropics_form(router: RunningRouter) -> None:
    for fields, said in (
        ({"max_tokens": ...}, "max_tokens: is required"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"model": "another"}, "does not exist"),
    ):
        body: dict[str, Any] = {"max_tokens": 5, "messages": ASK, **fields}
        answer = router.ask("/v1/messages", **{name: value for name, value in body.items() if value is not ...})
        assert answer.status_code in (400, 404)
        error = answer.json()
        assert error["type"] == "error"
        assert error["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert said in error["error"]["message"]


def test_what_other_clients_send_besides_is_ignored(router: RunningRouter) -> None:
    body = {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        ],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "x"},
        "context_management": {"edits": []},
        "anthropic_beta": ["x"],
    }
    answer = router.client.post("/v1/messages?beta=true", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-tandem-ignored-fields"] == "context_management,anthropic_beta"
    assert "Be brief." in router.prompt


def test_anthropics_header_carries_the_key(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("a", "secret"),))
    body = {"max_tokens": 2, "messages": ASK}
    assert router.client.post("/v1/messages", json=body, headers={"x-api-key": "secret"}).status_code == 200
    refused = router.client.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert error_of(refused, 401)["type"] == "authentication_error"


def test_a_call_that_was_cut_off_is_told(router: RunningRouter) -> None:
    length = len(router.server.services.model.tokenizer.encode(TEXT, special=False))
    answer = router.ask("/v1/messages", max_tokens=length - 20, messages=ASK, tools=[WEATHER]).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"]
