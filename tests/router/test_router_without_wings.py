"""A router whose wings of the API are not there: text is served, and what would need them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.api import wings
from tandem.api.settings import ReasoningName, ToolFormat
from tandem.base.errors import ConfigurationError
from tests.router.conftest import StartRouter, error_of
from tests.small_model import HERMES, THOUGHT, WEATHER

NOWHERE = "tandem.api.nowhere.at_all"


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORMATS", "IMAGES", "EMBEDS"):
        monkeypatch.setattr(wings, name, NOWHERE)


def test_calls_and_reasoning_are_text(start_saying: StartRouter, thinking_folder: str) -> None:
    text = f"<think>\n{THOUGHT}\n</think>\n\n{HERMES}"
    router = start_saying(text, tokenizer_path=thinking_folder)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = router.chat(**fields).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert "completion_tokens_details" not in answer["usage"]


def test_what_needs_them_is_refused(start_router: StartRouter) -> None:
    router = start_router(prompt_embeds=True)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}
    for fields, param in (
        ({"tools": [WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"messages": [image]}, "messages[0].content[0]"),
    ):
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], **fields}
        assert error_of(router.ask("/v1/chat/completions", **asked), 400)["param"] == param
    assert error_of(router.ask("/v1/completions", prompt_embeds="AAAA"), 400)["param"] == "prompt_embeds"


@pytest.mark.parametrize("settings", [{"tool_format": ToolFormat.HERMES}, {"reasoning_format": ReasoningName.THINK}])
def test_a_format_that_is_not_there_is_no_setting(start_router: StartRouter, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="has no api/formats"):
        start_router(**settings)
