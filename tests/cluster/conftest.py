"""What all tests of this room share."""

from __future__ import annotations

import pytest

from tandem.cluster.settings import rules


@pytest.fixture(autouse=True)
def _every_wing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the tree without some wings, their settings are still read by the same rules."""
    monkeypatch.setattr(rules, "is_there", lambda wing: True)
