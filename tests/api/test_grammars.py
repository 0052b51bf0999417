from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tandem.api.answer_format import CallsAsked, PlainText
from tandem.api.lark import json_schema
from tandem.api.openai import grammar_check, grammars
from tandem.api.openai.chat_request import ChatMessage, ChatRequest, FunctionDefinition, Tool
from tandem.api.openai.fields import SamplingFields
from tandem.api.openai.grammar_check import TOO_COSTLY, GrammarChecker
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import Unavailable


def test_a_short_schema_that_is_hard_to_check_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks do not run on the event loop: it goes on while one is under way. What was checked is not checked again."""
    checked: list[str] = []
    loop_went_on = threading.Event()

    def slow(checker: GrammarChecker, text: str) -> str:
        checked.append(text)
        assert loop_went_on.wait(10), "the event loop waited for it"
        return ""

    owner = CacheOwner("alice", "alice")

    async def scenario() -> None:
        check = asyncio.create_task(grammars.check_grammar("start: /once/", "p", owner))
        await asyncio.sleep(0)
        loop_went_on.set()
        await check
        await grammars.check_grammar("start: /once/", "p", owner)

    monkeypatch.setattr(GrammarChecker, "problem", slow)
    asyncio.run(scenario())
    assert checked == ["start: /once/"]
    asyncio.run(grammars.check_grammar("start: /once/", "p", CacheOwner("bob", "bob")))
    assert len(checked) == 2, "another tenant's check tells nothing"


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    with closing(GrammarChecker(cpu_s=1)) as made:
        yield made


def test_a_grammar_that_would_be_checked_for_hours_is_refused(checker: GrammarChecker) -> None:
    patterns = {f"^{at:05}.*$": {"type": "string"} for at in range(1000)}
    costly = f"start: %json {json_schema({'type': 'object', 'patternProperties': patterns})}"
    assert checker.problem("start: /once/") == ""
    for _ in range(2):
        assert checker.problem(costly) == TOO_COSTLY
        assert checker.problem("start: /once/") == "", "others go on"
    assert "unclosed" in checker.problem("start: /(/")


def test_a_chain_of_references_is_checked_however_long(checker: GrammarChecker) -> None:
    rules = [f'r{at}: "a" r{at + 1}' for at in range(4000)]
    assert checker.problem("\n".join([*rules, 'r4000: "b"', "start: r0"])) == ""


def test_a_checker_that_was_ended_begins_anew(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    others = psutil.Process().children()
    assert checker.problem("start: /once/") == ""
    (process,) = set(psutil.Process().children()) - set(others)
    process.kill()
    process.wait(10)
    assert checker.problem("start: /once/") == ""
    # One that does not run takes no more of a text than its pipe holds.
    (process,) = set(psutil.Process().children()) - set(others)
    process.suspend()
    with monkeypatch.context() as hurried:
        hurried.setattr(grammar_check, "_WALL_S", 0.1)
        with pytest.raises(Unavailable, match="send this again"):
            checker.problem(f"start: /{'a' * 200_000}/")
    assert checker.problem("start: /once/") == ""
    checker.close()
    assert psutil.Process().children() == others


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
