"""The connector in docs/connectors.md, unchanged, must pass all tests of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kv_document import DOCUMENT, installed_example
from kv_fake_engine import FakeEngine, consume, produce

from tandem.kvtransfer.base import KVCacheMemory, TransferStats
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.offload.spec import Copy, Tier, create_tier
from tandem.kvtransfer.protocol.side import Outcome
from tandem.wire.nodes import PeerAddress
from tests.kvtransfer.kv_tiers import ended


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


@pytest.mark.usefixtures("_installed")
def test_the_documents_tier_keeps_kv_for_the_next_process_and_reads_nothing_torn(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    cache = torch.rand(8, 2, 2, 3, 4, 8)
    memory = KVCacheMemory(cache, "m", 2, 1, 100)
    keys = [bytes([n]) * 32 for n in range(3)]

    def open_tier() -> Tier:
        tier = create_tier(TierConfig(spec="folder_tier:create", options={"folder": str(folder)}))
        tier.open(memory, lambda: None)
        return tier

    def copied(tier: Tier, job: Copy, *, load: bool) -> bool:
        tier.mover.submit([] if load else [job], [job] if load else [])
        return bool(ended(tier.mover, job.job)[job.job])

    before = cache.clone()
    tier = open_tier()
    room = tier.manager.prepare_store(keys)
    assert room is not None
    assert copied(tier, Copy(0, [1, 2, 3], [0, 0, 0], room.keys), load=False)
    tier.manager.complete_store(room, written=True)
    tier.close()
    cache.zero_()
    tier = open_tier()
    try:
        assert tier.manager.lookup([*keys, b"x" * 32]) == 3
        assert copied(tier, Copy(1, [5, 6], [0, 0], keys[:2]), load=True)
        assert (cache[[5, 6]] == before[[1, 2]]).all()
        (torn,) = folder.glob(f"*/{keys[2].hex()}")
        torn.write_bytes(torn.read_bytes()[:-1])
        assert not copied(tier, Copy(2, [7], [0], keys[2:]), load=True)
        tier.manager.reset()
        assert tier.manager.lookup(keys) == 0
        assert not copied(tier, Copy(3, [5], [0], keys[:1]), load=False), "it was planned before"
    finally:
        tier.close()


def test_the_document_names_every_outcome() -> None:
    text = DOCUMENT.read_text()
    assert not [outcome for outcome in Outcome if f"`{outcome.value}`" not in text]
    assert TransferStats().outcomes == {}
