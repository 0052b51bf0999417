"""The fault tests kill and stop real processes of real deployments, with the fixtures of the integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import deploy, expected, loop_thread, ray_on_this_machine

__all__ = ["deploy", "expected", "loop_thread", "ray_on_this_machine"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(600))
