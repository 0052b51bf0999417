"""What all tests of this room share."""

from __future__ import annotations

import pytest

from tandem.cluster.settings import rules
from tests.router.conftest import end_token, start_router

__all__ = ["end_token", "start_router"]  # a router with fake nodes, for commands that ask one


@pytest.fixture(autouse=True)
def _every_wing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the tree without some wings, their settings are still read by the same rules."""
    monkeypatch.setattr(rules, "is_there", lambda wing: True)
