"""A client with a large input delays no other client, and an input that cannot fit is refused before it costs any work."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from tandem.api.openai import answer
from tandem.api.openai.caller import Caller
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.plan import plan_completion
from tandem.wire.nodes import Role
from tests.router.conftest import StartRouter
from tests.router.paths import SERVED


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_what_cannot_fit_is_not_tokenized(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    running = start_router(prefill=0, decode=0)
    running.add("d", Role.DECODE, max_model_len=64)
    running.wait_ready()
    model = running.server.services.model

    def refuse(*args: Any) -> Any:
        raise AssertionError("it was tokenized")

    text = "x" * (model.tokenizer.most_characters(64) + 1)
    monkeypatch.setattr(model.tokenizer, "_encode_all", refuse)
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in endpoint else {"prompt": text}
    answer = running.client.post(endpoint, json={"model": running.config.model_name, **asked})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in asked
    assert "more than the model's context of 64 tokens can hold" in error["message"]


def test_between_many_short_prompts_the_event_loop_goes_on(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "TURN_S", -1.0)  # every turn is over at once
    running = start_router()
    model = running.server.services.model
    request = CompletionRequest(prompt=["the fox"] * 50)

    async def passes() -> int:
        count = 0

        async def others() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(others())
        await plan_completion(request, model, Caller("x", time.monotonic() + 60, lambda salt: salt, None))
        counting.cancel()
        return count

    assert running.call(passes()) >= 50


@pytest.mark.parametrize("path", [path for path in ("/v1/messages", "/v1/responses") if path in SERVED])
def test_a_long_body_becomes_a_chat_beside_everything_else(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    name = path.rpartition("/")[2]
    wing = importlib.import_module(f"tandem.router.{name}.wing")
    on_the_loop: list[bool] = []

    def watched(as_chat: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            try:
                on_the_loop.append(asyncio.get_running_loop() is not None)
            except RuntimeError:
                on_the_loop.append(False)
            return as_chat(*args)

        return make

    if name == "messages":
        monkeypatch.setattr(wing, "MESSAGES", structs.replace(wing.MESSAGES, translate=watched(wing.as_chat)))
    else:
        monkeypatch.setattr(wing, "as_chat", watched(wing.as_chat))
    running = start_router()
    for count in (1, 3000):
        said = [{"role": "user", "content": "x"}] * count
        running.client.post(path, json={"messages": said, "max_tokens": 1} if name == "messages" else {"input": said})
    assert on_the_loop == [True, False]


def chat_with(place: str, text: str) -> tuple[str, dict[str, Any]]:
    """A path, and a request that has the text at this place of its chat."""
    hello = [{"role": "user", "content": "x"}]
    schema = {"type": "object", "properties": {text: {"type": "string"}}}
    function = {"name": "f", "parameters": schema}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "part": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        "many messages": (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": text[:100]}] * (len(text) // 100 + 1)},
        ),
        "document": ("/v1/chat/completions", {"messages": hello, "documents": [{"text": text}]}),
        "tool": ("/v1/chat/completions", {"messages": hello, "tools": [{"type": "function", "function": function}]}),
        "variable": ("/v1/chat/completions", {"messages": hello, "chat_template_kwargs": {"about": [text]}}),
        "response": ("/v1/responses", {"input": text}),
        "instructions": ("/v1/responses", {"input": "x", "instructions": text}),
        "system": ("/v1/messages", {"messages": hello, "system": text, "max_tokens": 1}),
        "counted": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
        "tokenized": ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    }
    return requests[place]


PLACES = [
    "message", "part", "many messages", "document", "tool", "variable", "response", "instructions", "system", "counted",
    "tokenized",
]  # fmt: skip


@pytest.mark.parametrize("place", [place for place in PLACES if chat_with(place, "x")[0] in SERVED])
def test_a_chat_that_cannot_fit_is_refused_before_anything_looks_into_its_texts(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    running = start_router(prefill=0, decode=0)
    running.add("d", Role.DECODE, max_model_len=64)
    running.wait_ready()
    model = running.server.services.model

    def refuse(*args: Any) -> Any:
        raise AssertionError("it was looked into")

    monkeypatch.setattr(model.guard, "plain", refuse)
    monkeypatch.setattr(model.tokenizer, "_encode_all", refuse)
    path, body = chat_with(place, "<|start|>" * model.tokenizer.most_characters(64))
    answer = running.client.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert (
        f"than the model's context of 64 tokens can hold; send at most {model.tokenizer.most_characters(64)}" in message
    )


def test_what_is_only_tokenized_or_told_as_text_is_bounded_like_a_prompt(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_router(prefill=0, decode=0)
    running.add("d", Role.DECODE, max_model_len=64)
    running.wait_ready()
    tokenizer = running.server.services.model.tokenizer
    fits = running.client.post("/detokenize", json={"tokens": tokenizer.encode("x" * 40, special=False)})
    assert fits.json() == {"prompt": "x" * 40}

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("it was worked on")

    for name in ("_encode_all", "decode", "first_unknown"):
        monkeypatch.setattr(tokenizer, name, refuse)
    text = "x" * (tokenizer.most_characters(64) + 1)
    for path, body in (("/tokenize", {"prompt": text}), ("/detokenize", {"tokens": [5] * 65})):
        answer = running.client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] in body


def test_a_body_of_nothing_but_brackets(start_router: StartRouter) -> None:
    running = start_router(prefill=0, decode=0)
    body = b'{"model": "fake", "prompt": [' + b"[5]," * 200_000 + b"[5]]}"
    answer = running.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "100000 objects and arrays" in answer.json()["error"]["message"]
