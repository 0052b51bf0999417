"""A client with a large input delays no other client, and an input that cannot fit is refused before it costs any work."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

import tandem.api.text.tokenizer as tokenizer_module
from tandem.api.openai.chat_request import ChatMessage
from tandem.api.openai.prompts import INLINE_CHAT_CHARACTERS, INLINE_ITEMS, render_chat
from tandem.api.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.api.text.tokenizer import Tokenizer, matches
from tandem.wire.nodes import Role
from tests.router.conftest import StartRouter
from tests.router.paths import SERVED

LONG = "1234567890" * 40_000


async def longest_pause(work: Callable[[], Any]) -> tuple[float, float]:
    """Runs `work` in another thread. Returns the event loop's longest pause meanwhile, and how long the work took."""
    began = last = time.perf_counter()
    pause = 0.0
    working = asyncio.ensure_future(asyncio.to_thread(work))
    while not working.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        pause, last = max(pause, now - last), now
    return pause, time.perf_counter() - began


@pytest.mark.slow
def test_a_long_text_is_tokenized_beside_everything_else(tokenizer: Tokenizer) -> None:
    pause, took = asyncio.run(longest_pause(lambda: tokenizer.encode(LONG, special=False)))
    assert pause < took / 2


@pytest.mark.slow
def test_a_long_answer_is_decoded_beside_everything_else(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("fox", special=False) * 400_000
    pause, took = asyncio.run(longest_pause(lambda: tokenizer.decode(token_ids)))
    assert pause < took / 2


@pytest.mark.parametrize(
    "messages",
    [[ChatMessage("user", "x")] * (INLINE_ITEMS + 1), [ChatMessage("user", "<" * INLINE_CHAT_CHARACTERS)]],
    ids=["many messages", "many characters"],
)
def test_a_long_chat_is_rendered_beside_everything_else(
    tokenizer: Tokenizer, messages: list[ChatMessage]
) -> None:
    loop_went_on = threading.Event()

    class WaitingGuard(SpecialTextGuard):
        def plain(self, text: str) -> str:
            assert loop_went_on.wait(10)
            return super().plain(text)

    async def ask(context: int | None) -> str:
        asyncio.get_running_loop().call_soon(loop_went_on.set)
        return await render_chat(
            ChatTemplate({"default": "{{ messages | length }}"}, {}),
            WaitingGuard(tokenizer),
            messages,
            None,
            tokenizer=tokenizer,
            context=context,
            add_generation_prompt=True,
            continue_final_message=False,
            documents=[{"text": "a document"}],
            extra=None,
        )

    for context in (None, 1_000_000):
        loop_went_on.clear()
        assert asyncio.run(ask(context)) == str(len(messages))


MARK = "<|start|>"


@given(
    st.text("ab<|")
    | st.lists(st.sampled_from([MARK, "<|start|", "<|end|>", "<|endless|>", "<", "a"])).map("".join)
)
def test_a_text_is_searched_in_windows_as_it_would_be_at_once(text: str) -> None:
    pattern = re.compile("|".join(map(re.escape, ("<|endless|>", MARK, "<|end|>", "<|"))))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenizer_module, "_WINDOW_CHARACTERS", 5)
        found = [one.span() for one in matches(pattern, text, len("<|endless|>"))]
    assert found == [one.span() for one in pattern.finditer(text)]


def composing() -> Tokenizer:
    """A tokenizer that composes Unicode characters before it tokenizes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


@given(st.text() | st.text("\u03b1\u0313\u0300\u0345\u1112\u1161\u11abe\u0301"))
def test_no_text_is_called_too_long_that_fits(tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, composing()):
        assert len(text) <= one.most_characters(len(one.encode(text, special=False)))


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


def chat_with(place: str, text: str) -> tuple[str, dict[str, Any]]:
    """A path, and a request that has the text at this place of its chat."""
    hello = [{"role": "user", "content": "x"}]
    schema = {"type": "object", "properties": {text: {"type": "string"}}}
    function = {"name": "f", "parameters": schema}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "part": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        ),
        "many messages": (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": text[:100]}] * (len(text) // 100 + 1)},
        ),
        "document": ("/v1/chat/completions", {"messages": hello, "documents": [{"text": text}]}),
        "tool": (
            "/v1/chat/completions",
            {"messages": hello, "tools": [{"type": "function", "function": function}]},
        ),
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
        f"than the model's context of 64 tokens can hold; send at most {model.tokenizer.most_characters(64)}"
        in message
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
    answer = running.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert "100000 objects and arrays" in answer.json()["error"]["message"]
