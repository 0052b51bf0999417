"""The host-memory tier: its copies, and what it refuses."""

from __future__ import annotations

import threading

import pytest
import torch

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload.cpu import Copier, CopyThread, CpuTier, HostCopier
from tandem.kvtransfer.offload.manager import ReuseFilter
from tandem.kvtransfer.offload.patience import Hold
from tandem.kvtransfer.offload.spec import Copy, create_tier
from tandem.kvtransfer.protocol.transport import runs_of
from tests.kvtransfer.offload.kv_tiers import ended

PATIENCE_S = 20.0


def memory(num_blocks: int = 16, *, transposed: bool = False) -> KVCacheMemory:
    if transposed:
        tensor = torch.rand(num_blocks, 2, 2, 4, 3, 8).permute(0, 1, 2, 4, 3, 5)
    else:
        tensor = torch.rand(num_blocks, 2, 2, 3, 4, 8)
    return KVCacheMemory(tensor, "m", 2, 1, 100)


def test_neighbours_are_copied_together() -> None:
    assert list(runs_of([3, 4, 5, 9, 10, 1], [7, 8, 9, 2, 4, 5])) == [(3, 7, 3), (9, 2, 1), (10, 4, 1), (1, 5, 1)]
    assert list(runs_of([6], [0])) == [(6, 0, 1)]


@pytest.mark.parametrize("transposed", [False, True])
def test_what_was_stored_is_what_is_loaded(transposed: bool) -> None:
    cache = memory(transposed=transposed)
    copier = HostCopier(cache, 8)
    before = cache.tensor.clone()
    copier.copy(Copy(0, [3, 4, 9], [5, 6, 0]), to_device=False, fence=None, hold=Hold())
    cache.tensor.zero_()
    copier.copy(Copy(1, [1, 2], [6, 0]), to_device=True, fence=None, hold=Hold())
    assert (cache.tensor[1] == before[4]).all()
    assert (cache.tensor[2] == before[9]).all()
    assert not cache.tensor[3:].any()


class GatedCopier(Copier):
    """Copies only when the test lets it."""

    def __init__(self) -> None:
        super().__init__(memory())
        self.begun = threading.Event()
        self.gate = threading.Semaphore(0)
        self.done: list[int] = []

    def copy(self, job: Copy, to_device: bool, fence: object, hold: Hold) -> bool:
        self.begun.set()
        self.gate.acquire()
        if job.job < 0:
            raise OSError("the copy failed")
        self.done.append(job.job)
        return True


def test_loads_go_before_stores() -> None:
    copier, woken, before = GatedCopier(), threading.Event(), {*threading.enumerate()}
    thread = CopyThread(copier, woken.set)
    try:
        thread.submit([Copy(0, [1], [1])], [])
        assert copier.begun.wait(PATIENCE_S)
        thread.submit([Copy(1, [1], [1]), Copy(2, [2], [2])], [Copy(3, [3], [3])])
        for _ in range(4):
            copier.gate.release()
        assert ended(thread, 0, 1, 2, 3) == {0: True, 3: True, 1: True, 2: True}
        assert copier.done == [0, 3, 1, 2]
        assert woken.is_set()
        assert thread.take_ended() == {}
        assert (thread.stored_bytes, thread.loaded_bytes) == (3 * copier.block_bytes, copier.block_bytes)
    finally:
        thread.close()
    assert "kv-tier" not in {each.name for each in {*threading.enumerate()} - before}


def test_a_thread_that_died_is_an_error_and_no_silence() -> None:
    copier, woken = GatedCopier(), threading.Event()
    thread = CopyThread(copier, woken.set)
    copier.gate.release()
    thread.submit([], [Copy(-1, [1], [1])])
    assert woken.wait(PATIENCE_S)
    with pytest.raises(InternalError, match="died"):
        thread.take_ended()
    thread.close()


def test_a_tier_tells_its_size_and_what_went_through_it() -> None:
    cache = memory()
    tier = create_tier(TierConfig(cpu=10 * cache.block_bytes, block_factor=2, store_threshold=2))
    tier.open(cache, lambda: None)
    try:
        assert isinstance(tier.manager, ReuseFilter)
        tier.manager.touch([b"a"])
        tier.manager.touch([b"a"])
        room = tier.manager.prepare_store([b"a", b"b"])
        assert room is not None
        tier.mover.submit([Copy(0, [1, 2], [0, 1])], [])
        assert ended(tier.mover, 0) == {0: True}
        status = tier.status()
        assert (status.name, status.total_bytes, status.used_bytes) == (
            "cpu",
            10 * cache.block_bytes,
            2 * cache.block_bytes,
        )
        assert status.stored_bytes == 2 * cache.block_bytes
    finally:
        tier.close()
        tier.close()


def test_too_little_memory_and_unknown_specs_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="no room for 1 of this model's blocks"):
        CpuTier(TierConfig(cpu=100)).open(memory(), lambda: None)
    with pytest.raises(
        ConfigurationError, match=r"cache.tiers: there is no spec 'tape'; there are cpu, disk, objects, synthetic"
    ):
        create_tier(TierConfig(spec="tape"))
    with pytest.raises(ConfigurationError, match="each entry is one of"):
        TierConfig()
    assert create_tier(TierConfig(spec="tandem.kvtransfer.offload.cpu:create")).spec.name == "cpu"
