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
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.paths import SERVED, of_served


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    """A router whose model has a short context."""
    return keep_router(prefill=0, node={"max_model_len": 64})


def refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("it was worked on")


def test_what_cannot_fit_is_not_tokenized(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = router.server.services.model.tokenizer
    fits = router.ask("/detokenize", tokens=tokenizer.encode("x" * 40, special=False))
    assert fits.json() == {"prompt": "x" * 40}
    text = "x" * (tokenizer.most_characters(64) + 1)
    for name in ("_encode_all", "decode", "first_unknown"):
        monkeypatch.setattr(tokenizer, name, refuse)
    for path, asked in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/detokenize", {"tokens": [5] * 65}),
    ):
        answer = router.ask(path, **asked)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"] in asked) == ("context_length_exceeded", True)
        assert path == "/detokenize" or "more than the model's context of 64 tokens can hold" in error["message"]


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
        running.client.post(
            path,
            json={"messages": said, "max_tokens": 1} if name == "messages" else {"input": said, "max_output_tokens": 1},
        )
    assert on_the_loop == [True, False]


def chats_with(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Paths, and requests that have the text at every place where a chat may have it."""
    hello = [{"role": "user", "content": "x"}]
    said = [{"role": "user", "content": text}]
    schema = {"type": "object", "properties": {text: {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = "/v1/chat/completions"
    return of_served(
        (chat, {"messages": said}),
        (chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        (chat, {"messages": [{"role": "system", "content": text[:100]}] * (len(text) // 100 + 1)}),
        (chat, {"messages": hello, "documents": [{"text": text}]}),
        (chat, {"messages": hello, "tools": [tool]}),
        (chat, {"messages": hello, "chat_template_kwargs": {"about": [text]}}),
        ("/v1/responses", {"input": text}),
        ("/v1/responses", {"input": "x", "instructions": text}),
        ("/v1/messages", {"messages": hello, "system": text, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": said}),
        ("/tokenize", {"messages": said}),
    )


def test_a_chat_that_cannot_fit_is_refused_before_anything_looks_into_its_texts(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = router.server.services.model
    monkeypatch.setattr(model.guard, "plain", refuse)
    monkeypatch.setattr(model.tokenizer, "_encode_all", refuse)
    most = model.tokenizer.most_characters(64)
    for path, body in chats_with("<|start|>" * most):
        message = router.ask(path, **body).json()["error"]["message"]
        assert f"than the model's context of 64 tokens can hold; send at most {most}" in message, body.keys()


def test_a_body_of_nothing_but_brackets(router: RunningRouter) -> None:
    body = b'{"model": "fake", "prompt": [' + b"[5]," * 100_000 + b"[5]]}"
    answer = router.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert "100000 objects and arrays" in error_of(answer, 400)["message"]
