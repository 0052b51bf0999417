"""A client with a large input delays no other client, and an input that cannot fit is refused before it costs any work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tandem.router.openai.chat_request import ChatMessage
from tandem.router.openai.prompts import INLINE_ITEMS, render_chat
from tandem.router.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.nodes import Role
from tests.router.conftest import StartRouter

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


def test_a_long_chat_is_rendered_beside_everything_else(tokenizer: Tokenizer) -> None:
    loop_went_on = threading.Event()

    class WaitingTemplate(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            assert loop_went_on.wait(10)
            return super().render(*args, **options)

    async def ask() -> str:
        asyncio.get_running_loop().call_soon(loop_went_on.set)
        return await render_chat(
            WaitingTemplate({"default": "{{ messages | length }}"}, {}),
            SpecialTextGuard(tokenizer),
            [ChatMessage("user", "x")] * (INLINE_ITEMS + 1),
            None,
            add_generation_prompt=True,
            continue_final_message=False,
            extra=None,
        )

    assert asyncio.run(ask()) == str(INLINE_ITEMS + 1)


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
    assert "characters are more than the model's context of 64 tokens" in error["message"]


def test_a_body_of_nothing_but_brackets(start_router: StartRouter) -> None:
    running = start_router(prefill=0, decode=0)
    body = b'{"model": "fake", "prompt": [' + b"[5]," * 200_000 + b"[5]]}"
    answer = running.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert "100000 objects and arrays" in answer.json()["error"]["message"]
