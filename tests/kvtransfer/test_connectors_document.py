"""The connector in docs/connectors.md, unchanged, must pass all tests of the contract."""

from __future__ import annotations

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
