"""docs/api.md says what the code does: every field, policy, deadline and code that it names or must name."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import PolicyName, Timeouts
from router.metrics import RouterMetrics
from router.openai.chat_request import ChatRequest
from router.openai.completion_request import CompletionRequest
from router.openai.fields import ACCEPTED, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *ACCEPTED, *REFUSED}),
)
def test_every_field_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("policy", list(PolicyName))
def test_every_policy_is_on_the_page(policy: PolicyName) -> None:
    assert f"`{policy.value}`" in PAGE


@pytest.mark.parametrize(
    "name", ["queue", "first_token", "token_idle", "total", "slow_reader", "failover_wait"]
)
def test_every_deadline_of_a_request_is_on_the_page(name: str) -> None:
    assert name in Timeouts.__struct_fields__
    assert f"`{name}`" in PAGE


def test_the_metrics_on_the_page_exist() -> None:
    names = {metric.name.removeprefix("tandem_") for metric in RouterMetrics().registry.collect()}
    section = PAGE.partition("## Metrics")[2]
    for word in section.replace("`", " ").replace(",", " ").split():
        if "_" in word and not word.startswith("tandem_"):
            assert word.removesuffix("_total").strip("().") in names, word
