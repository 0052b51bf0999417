"""The tier in docs/connectors.md, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kv_document import installed_example

from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload.spec import Copy, Tier, create_tier
from tests.kvtransfer.offload.kv_tiers import ended


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    with installed_example(tmp_path):
        yield


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
