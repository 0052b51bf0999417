from __future__ import annotations

import asyncio
import threading

import pytest

from tandem.api.openai import grammars
from tandem.api.text.tenant_cache import CacheOwner


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
