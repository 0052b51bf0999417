"""The fault tests kill and stop real processes of real deployments, with the fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import deploy, loop_thread, ray_on_this_machine
from tests.integration.reference import make_prompts

__all__ = ["deploy", "loop_thread", "ray_on_this_machine"]


@pytest.fixture(scope="session")
def prompts(smollm2_path: Path) -> Callable[[int], list[int]]:
    """Makes a prompt of so many tokens: always the same one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    return lambda length: make_prompts(tokenizer, [length])[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(600))
