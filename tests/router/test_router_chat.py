from __future__ import annotations

import json

import pytest

from tandem.api.text.tokenizer import Tokenizer
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter

CHAT = "/v1/chat/completions"


def prompt_of(*messages: tuple[str, str]) -> str:
    return "".join(f"<|start|>{role}\n{content}<|end|>\n" for role, content in messages) + "<|start|>assistant\n"


def test_messages_go_through_the_models_template(router: RunningRouter) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
    ]
    body = router.ask(CHAT, messages=messages, max_completion_tokens=5, seed=4).json()
    expected = prompt_of(("system", "be brief"), ("user", "hi\nyou"))
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == router.expected(expected, 5, seed=4, special=False)
    assert choice["finish_reason"] == "length"
    # A message to go on with.
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
    body = router.ask(CHAT, messages=messages, max_tokens=3, seed=1, continue_final_message=True).json()
    prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\nI say"
    assert body["choices"][0]["message"]["content"] == router.expected(prompt, 3, seed=1, special=False)


def test_without_a_limit_the_answer_may_fill_the_context(start_router: StartRouter, tokenizer: Tokenizer) -> None:
    router = start_router(prefill=0, decode=0)
    router.add("d0", Role.DECODE, max_model_len=40)
    router.wait_ready()
    body = router.chat("hi").json()
    assert body["usage"]["total_tokens"] == 40
    assert body["choices"][0]["finish_reason"] == "length"


def test_chat_logprobs_name_token_bytes_and_alternatives(router: RunningRouter) -> None:
    choice = router.chat(max_tokens=3, logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in content] == [entry["token"] for entry in content]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    bare = router.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(router: RunningRouter) -> None:
    answer = router.chat(stream=True, max_tokens=4, seed=2, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    *with_choices, last = bodies = [json.loads(line) for line in lines]
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    assert len({body["id"] for body in bodies}) == 1
    assert with_choices[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(body["choices"][0]["delta"].get("content", "") for body in with_choices)
    assert text == router.expected(prompt_of(("user", "hi")), 4, seed=2, special=False)
    assert with_choices[-1]["choices"][0]["finish_reason"] == "length"
    assert with_choices[-1]["choices"][0]["delta"] == {}
    assert all(body["usage"] is None for body in with_choices)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_choices_are_each_complete(start_router: StartRouter, n: int) -> None:
    router = start_router(decode=2)
    with router.stream(n=n, max_tokens=6, seed=30, logprobs=0) as events:
        bodies = events.rest()
    assert bodies.pop() == "[DONE]"
    for index in range(n):
        mine = [body["choices"][0] for body in bodies if body["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == router.expected("the fox", 6, seed=30 + index)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert sum(len(c["logprobs"]["tokens"]) for c in mine if c["logprobs"]) == 6
