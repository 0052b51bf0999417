from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.api.answer_format import CallsAsked, PlainText
from tandem.api.lark import json_schema
from tandem.api.openai import grammars
from tandem.api.openai.chat_request import ChatMessage, ChatRequest, FunctionDefinition, Tool
from tandem.api.openai.fields import SamplingFields
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.text.tokenizer import Tokenizer


def test_a_short_schema_that_is_hard_to_check_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run in threads: while one is under way, the event loop goes on. What was checked is not checked again."""
    checked: list[str] = []
    loop_went_on = threading.Event()

    def slow(text: str) -> None:
        checked.append(text)
        assert loop_went_on.wait(10), "the event loop waited for it"

    owner = CacheOwner("alice", "alice")

    async def scenario() -> None:
        check = asyncio.create_task(grammars.check_grammar("start: /once/", "p", owner))
        await asyncio.sleep(0)
        loop_went_on.set()
        await check
        await grammars.check_grammar("start: /once/", "p", owner)

    monkeypatch.setattr(grammars, "_problem", slow)
    asyncio.run(scenario())
    assert checked == ["start: /once/"]
    asyncio.run(grammars.check_grammar("start: /once/", "p", CacheOwner("bob", "bob")))
    assert len(checked) == 2, "another tenant's check tells nothing"


async def test_one_keys_grammars_in_ebnf_leave_threads_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one of 256 kB takes seconds, and the interpreter with them."""
    begun: asyncio.Queue[str] = asyncio.Queue()
    loop, go = asyncio.get_running_loop(), threading.Event()

    def slow(text: str) -> str:
        loop.call_soon_threadsafe(begun.put_nowait, text)
        assert go.wait(20)
        return "start: /a/"

    monkeypatch.setattr(grammars, "gbnf_to_lark", slow)
    asked = [
        asyncio.create_task(grammars.outputs_wanted(SamplingFields(ebnf=text), CacheOwner(tenant, tenant)))
        for tenant, text in (("greedy", "first"), ("greedy", "second"), ("greedy", "third"), ("other", "other's"))
    ]
    try:
        assert [await begun.get() for _ in range(2)] == ["first", "other's"]
        await asyncio.sleep(0)
        assert begun.empty()
    finally:
        go.set()
        await asyncio.gather(*asked)


def test_a_grammar_of_many_tools_is_written_beside_everything_else(tokenizer: Tokenizer) -> None:
    loop_went_on = threading.Event()

    class Waiting(PlainText):
        reads_calls = True

        def calls_grammar(self, asked: CallsAsked, answer: str | None, tokenizer: Tokenizer) -> str | None:
            assert loop_went_on.wait(10), "the event loop waited for it"
            return None

    tools = [Tool("function", FunctionDefinition(f"f{at}", parameters={"x": "y" * 1000})) for at in range(50)]
    request = ChatRequest(messages=[ChatMessage("user", "x")], tools=tools, tool_choice="required")
    model: Any = SimpleNamespace(format=Waiting(), tokenizer=tokenizer)

    async def ask() -> str | None:
        asyncio.get_running_loop().call_soon(loop_went_on.set)
        return await grammars.chat_grammar(request, tools, model, CacheOwner())

    assert asyncio.run(ask()) is None


def test_a_chain_of_references_is_checked_however_long() -> None:
    """It ended the router's process: the library follows each reference on the stack."""
    links = 4000
    schema = {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)} | {f"d{links}": {"type": "null"}},
    }
    rules = [f'r{i}: "a" r{i + 1}' for i in range(links)]
    for grammar in (f"start: %json {json_schema(schema)}", "\n".join([*rules, f'r{links}: "b"', "start: r0"])):
        asyncio.run(grammars.check_grammar(grammar, "p", CacheOwner("bob", "bob")))
