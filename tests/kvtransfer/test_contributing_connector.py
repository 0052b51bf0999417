"""The connector in docs/contributing.md moves KV, and logs it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from kv_fake_engine import FakeEngine, consume, produce

from tandem.kvtransfer.config import TransferConfig
from tandem.wire.nodes import PeerAddress

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"


def test_the_connector_logs_what_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = re.search(r"^```python connector\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "my_connector.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, logger="my_connector")
    config = TransferConfig(connector="my_connector:create")
    producer = FakeEngine(config.connector, "p", 1, config)
    consumer = FakeEngine(config.connector, "c", 2, config)
    try:
        tokens = list(range(100, 137))
        consumer.add("r", tokens, consume("t", PeerAddress("p", 1, producer.endpoint())))
        producer.add("r", tokens, produce("t", PeerAddress("c", 2, consumer.endpoint())), chunk=8)
        consumer.step()
        producer.run_until("r", ["freed"])
        assert consumer.run_until("r", ["loaded", "failed"]) == "loaded", consumer.failure("r")
        assert "r: 37 tokens arrived" in caplog.messages
    finally:
        producer.close()
        consumer.close()
