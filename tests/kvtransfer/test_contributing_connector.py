"""The connector in docs/contributing.md moves KV, and logs it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from kv_fake_engine import hand_over_by

from tandem.kvtransfer.config import TransferConfig

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"


def test_the_connector_logs_what_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = re.search(r"^```python connector\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "my_connector.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, logger="my_connector")
    hand_over_by(TransferConfig(connector="my_connector:create"))
    assert "r: 37 tokens arrived" in caplog.messages
