from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator's, with the key that `cluster_file` names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").touch()
    return tmp_path
