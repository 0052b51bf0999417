"""The connectors in docs/connectors.md and docs/contributing.md, unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_document import DOCUMENT, installed_example
from kv_fake_engine import hand_over_by

from tandem.kvtransfer.base import TransferStats
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.protocol.side import Outcome


@pytest.fixture
def _installed(tmp_path: Path) -> Iterator[None]:
    with installed_example(tmp_path):
        yield


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_documents_connector_moves_kv(direction: str) -> None:
    hand_over_by(TransferConfig(connector="local_connector:create", direction=direction))


def test_the_document_names_every_outcome() -> None:
    text = DOCUMENT.read_text()
    assert not [outcome for outcome in Outcome if f"`{outcome.value}`" not in text]
    assert TransferStats().outcomes == {}


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
