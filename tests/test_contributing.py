"""docs/contributing.md's examples, each whole: they are run as they stand."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.router.config import LocalPrefill, PolicyName
from tandem.router.http.exchange import HttpExchange
from tandem.router.policy.choose import decide
from tests.router.test_router_policy import ask, node, pools

PAGE = Path(__file__).parents[1] / "docs" / "contributing.md"
EXAMPLES = dict(
    re.findall(r"^```python ([\w ]+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
)


def example(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLES[name], f"{PAGE.name}: {name}", "exec", dont_inherit=True), names)
    return names


def test_there_is_one_of_each_and_none_is_long() -> None:
    assert set(EXAMPLES) == {"policy", "connector", "model rule", "endpoint", "setting"}
    assert max(len(text.splitlines()) for text in EXAMPLES.values()) < 30


def test_the_policy_chooses() -> None:
    snapshot = pools(node("p0"), node("d0", free_blocks=3), node("d1", free_blocks=7))
    rank = example("policy")["most_room"]
    decision = decide(snapshot, ask(), rank, PolicyName.LEAST_WAIT, LocalPrefill.NEVER)
    assert decision.decode is not None
    assert decision.decode.node_id == "d1"
    assert "7 blocks free" in decision.reason


def test_the_models_rule_holds() -> None:
    example("model rule")


def test_the_endpoint_answers() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("it reads nothing")

    scope = {"type": "http", "path": "/motto", "headers": [], "state": {"connection": None}}
    exchange = HttpExchange(scope, receive, send, "its id", None)
    services = SimpleNamespace(config=SimpleNamespace(model_name="m"))
    asyncio.run(example("endpoint")["motto"](services, exchange))
    assert sent[0]["status"] == 200
    assert sent[1]["body"] == b'{"motto":"two pools, one answer","model":"m"}'


def test_the_setting_is_checked() -> None:
    limits = example("setting")["LimitsConfig"]
    assert limits().prompts == 128
    with pytest.raises(ConfigurationError, match=r"limits\.prompts must be at least 1, not 0"):
        limits(prompts=0)
