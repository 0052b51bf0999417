"""The connector in docs/connectors.md, unchanged, must pass all tests of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_document import DOCUMENT, installed_example
from kv_fake_engine import FakeEngine, consume, produce

from tandem.kvtransfer.base import TransferStats
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.protocol.side import Outcome
from tandem.wire.nodes import PeerAddress


@pytest.fixture
def _installed(tmp_path: Path) -> Iterator[None]:
    with installed_example(tmp_path):
        yield


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_documents_connector_moves_kv(direction: str) -> None:
    config = TransferConfig(connector="local_connector:create", direction=direction)
    producer = FakeEngine(config.connector, "p", 1, config)
    consumer = FakeEngine(config.connector, "c", 2, config)
    try:
        tokens = list(range(100, 137))
        consumer.add("r", tokens, consume("t", PeerAddress("p", 1, producer.endpoint())))
        producer.add("r", tokens, produce("t", PeerAddress("c", 2, consumer.endpoint())), chunk=8)
        consumer.step()
        producer.run_until("r", ["freed"])
        assert consumer.run_until("r", ["loaded", "failed"]) == "loaded", consumer.failure("r")
        assert consumer.kv_is_right("r")
    finally:
        producer.close()
        consumer.close()


def test_the_document_names_every_outcome() -> None:
    text = DOCUMENT.read_text()
    assert not [outcome for outcome in Outcome if f"`{outcome.value}`" not in text]
    assert TransferStats().outcomes == {}
