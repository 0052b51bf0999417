"""The server that a program starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.offline.own_server import OwnServer


@pytest.mark.slow
def test_what_lies_in_the_programs_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: starts an interpreter."""
    for name in ("tandem", "msgspec", "random"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of this folder was imported')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"the server did not start: .*'/nowhere' is not there"):
        OwnServer("/nowhere")
