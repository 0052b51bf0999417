"""A client with a large input delays no other client."""

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

from tandem.api.openai.chat_prompt import INLINE_CHAT_CHARACTERS, INLINE_ITEMS, TemplateInput, render_chat
from tandem.api.openai.chat_request import ChatMessage
from tandem.api.text import segment_cache
from tandem.api.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.api.text.segment_cache import matches
from tandem.api.text.tokenizer import Tokenizer

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
def test_a_long_chat_is_rendered_beside_everything_else(tokenizer: Tokenizer, messages: list[ChatMessage]) -> None:
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
            tokenizer,
            TemplateInput(messages, documents=[{"text": "a document"}]),
            context,
            "a key",
        )

    for context in (None, 1_000_000):
        loop_went_on.clear()
        assert asyncio.run(ask(context)) == str(len(messages))


async def test_one_keys_long_chats_leave_threads_for_others(tokenizer: Tokenizer) -> None:
    begun: asyncio.Queue[str] = asyncio.Queue()
    loop, go = asyncio.get_running_loop(), threading.Event()

    class SlowGuard(SpecialTextGuard):
        def plain(self, text: str) -> str:
            if len(text) >= INLINE_CHAT_CHARACTERS:
                loop.call_soon_threadsafe(begun.put_nowait, text[:1])
                assert go.wait(20)
            return super().plain(text)

    def asked(tenant: str, letter: str) -> asyncio.Task[str]:
        chat = TemplateInput([ChatMessage("user", letter * INLINE_CHAT_CHARACTERS)])
        return asyncio.create_task(
            render_chat(ChatTemplate({"default": "x"}, {}), SlowGuard(tokenizer), tokenizer, chat, None, tenant)
        )

    chats = [asked("greedy", "a"), asked("greedy", "b"), asked("greedy", "c"), asked("other", "o")]
    try:
        assert [await begun.get() for _ in range(2)] == ["a", "o"]
        await asyncio.sleep(0)
        assert begun.empty()
    finally:
        go.set()
        assert await asyncio.gather(*chats) == ["x"] * 4


MARK = "<|start|>"


@given(st.text("ab<|") | st.lists(st.sampled_from([MARK, "<|start|", "<|end|>", "<|endless|>", "<", "a"])).map("".join))
def test_a_text_is_searched_in_windows_as_it_would_be_at_once(text: str) -> None:
    pattern = re.compile("|".join(map(re.escape, ("<|endless|>", MARK, "<|end|>", "<|"))))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segment_cache, "WINDOW_CHARACTERS", 5)
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
