"""Tiers of ranks that keep their KV apart: a copy has ended when it has ended at every rank, and is right if it is right at every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import HeadShare, KVCacheMemory, LayerShare
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload import disk
from tandem.kvtransfer.offload.cpu import HostCopier
from tandem.kvtransfer.offload.disk import DiskCopier
from tandem.kvtransfer.offload.ranks import MakeCopies, RankTiers, TierLines, TierOfRanks
from tandem.kvtransfer.offload.spec import Copy, Tier
from tests.waiting import until

PATIENCE_S = 20.0
BLOCKS, HEADS, SLOTS = 12, 2, 3
BLOCK_BYTES = SLOTS * 2 * HEADS * 4 * 8 * 4  # on all ranks


def caches(first: float = 0.0) -> list[KVCacheMemory]:
    """Two stages of two and one of three layers, with a rank for each head."""
    whole = torch.arange(BLOCKS * SLOTS * 2 * HEADS * 4 * 8, dtype=torch.float32)
    whole = whole.view(BLOCKS, SLOTS, 2, HEADS, 4, 8) + first
    return [
        KVCacheMemory(
            whole[:, begin : begin + count, :, head : head + 1].clone(), "m", SLOTS, 1, 1000,
            heads=HeadShare(head, 1, HEADS),
            layers=LayerShare(((begin, count),), SLOTS),
        )
        for begin, count in ((0, 2), (2, 1))
        for head in range(HEADS)
    ]  # fmt: skip


class Node:
    def __init__(self, config: TierConfig, memories: Sequence[KVCacheMemory]) -> None:
        self.memories = memories
        self.woken = threading.Event()
        self.failed: list[int] = []
        pairs = [socket.socketpair() for _ in memories[1:]]
        self.ranks = [
            RankTiers(theirs, memory, lambda: self.failed.append(1))
            for (_, theirs), memory in zip(pairs, memories[1:], strict=True)
        ]
        for rank in self.ranks:
            rank.start()
        self.lines = TierLines([ours for ours, _ in pairs], self.woken.set)
        self.tier = Tier(TierOfRanks(config, self.lines), config.block_factor)
        self.tier.open(memories[0], self.woken.set)

    def ended(self, *jobs: int) -> dict[int, bool | None]:
        until = time.monotonic() + PATIENCE_S
        found: dict[int, bool | None] = {}
        while not found.keys() >= set(jobs):
            self.woken.wait(max(0.0, until - time.monotonic()))
            self.woken.clear()
            found |= self.tier.mover.take_ended()
            assert time.monotonic() < until, found
        assert found.keys() == set(jobs)
        return found

    def close(self) -> None:
        self.tier.close()
        for rank in self.ranks:
            rank.stop(PATIENCE_S)


@contextlib.contextmanager
def node(config: TierConfig, memories: Sequence[KVCacheMemory] | None = None) -> Iterator[Node]:
    made = Node(config, memories or caches())
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["cpu", "disk"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> TierConfig:
    if request.param == "cpu":
        return TierConfig(cpu=20 * BLOCK_BYTES + 5)
    return TierConfig(disk=str(tmp_path), size=20 * (BLOCK_BYTES + 4 * 4096) + 5)


KEYS = [b"a" * 32, b"b" * 32]
STORE = Copy(1, [3, 7], [4, 0], KEYS)


def test_every_rank_stores_and_loads_its_own_part(config: TierConfig) -> None:
    with node(config) as here:
        assert here.tier.manager.capacity == 20
        assert here.tier.status().total_bytes == 20 * BLOCK_BYTES
        here.tier.mover.submit([STORE], [])
        assert here.ended(1) == {1: True}
        kept = [memory.tensor.clone() for memory in here.memories]
        for memory in here.memories:
            memory.tensor.zero_()
        here.tier.mover.submit([], [Copy(2, [5, 6], [4, 0], KEYS)])
        assert here.ended(2) == {2: True}
        for memory, before in zip(here.memories, kept, strict=True):
            assert torch.equal(memory.tensor[[5, 6]], before[[3, 7]])
            assert not memory.tensor[3].any()
        assert here.tier.mover.stored_bytes == here.tier.mover.loaded_bytes == 2 * BLOCK_BYTES
        assert not here.failed


class StepOnDevice:
    """An event on rank 0's stream."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


def test_a_store_is_told_when_the_device_has_computed_it_and_holds_up_no_load(config: TierConfig) -> None:
    with node(config) as here:
        here.tier.mover.submit([STORE], [])
        assert here.ended(1) == {1: True}
        step, load = StepOnDevice(), Copy(3, [5], [4], KEYS[:1])
        here.lines.post(MakeCopies(0, [Copy(2, [1], [7], KEYS[:1])], []), step)
        here.lines.post(MakeCopies(0, [], [load]), None)
        until(lambda: here.lines.take_ended(0) == {3: True})
        step.happened.set()
        until(lambda: here.lines.take_ended(0) == {2: True})


def instead_of_copies(
    monkeypatch: pytest.MonkeyPatch, memory: KVCacheMemory, copy_there: Callable[[Copy, Callable[[], bool]], bool]
) -> None:
    """What the rank with this memory does, given a copy and what it would do."""
    for kind in (HostCopier, DiskCopier):

        def patched(self: Any, job: Copy, *args: Any, copy: Any = kind.copy) -> bool:
            where = self._tensor if isinstance(self, HostCopier) else self._blocks
            if where.data_ptr() == memory.tensor.data_ptr():
                return copy_there(job, lambda: bool(copy(self, job, *args)))
            return bool(copy(self, job, *args))

        monkeypatch.setattr(kind, "copy", patched)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_copy_that_is_wrong_at_one_rank_is_wrong(
    config: TierConfig, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = caches()
    instead_of_copies(monkeypatch, memories[rank], lambda job, copy: copy() and job.job != 1)
    with node(config, memories) as here:
        here.tier.mover.submit([STORE], [])
        here.tier.mover.submit([Copy(2, [1], [3], KEYS[:1])], [])
        assert here.ended(1, 2) == {1: False, 2: True}


def test_a_copy_has_ended_when_it_has_at_all_ranks(config: TierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    memories, go_on, over = caches(), threading.Event(), list[int]()
    for rank in (0, 1, 3):
        instead_of_copies(monkeypatch, memories[rank], lambda job, copy: copy() and over.append(job.job) is None)
    instead_of_copies(monkeypatch, memories[2], lambda job, copy: go_on.wait(PATIENCE_S) and copy())
    with node(config, memories) as here:
        here.tier.mover.submit([STORE], [])
        until(lambda: len(over) == 3)
        assert not here.tier.mover.take_ended()
        go_on.set()
        assert here.ended(1) == {1: True}


def test_what_one_rank_gives_up_is_given_up_and_leaves_the_tier_out(
    config: TierConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories, go_on = caches(), threading.Event()
    instead_of_copies(monkeypatch, memories[2], lambda job, copy: go_on.wait(PATIENCE_S) and copy())
    with node(config, memories) as here:
        here.tier.mover.submit([dataclasses.replace(STORE, within_s=0.0)], [])
        assert here.ended(1) == {1: None}
        assert here.tier.status().left_out
        here.tier.mover.submit([], [Copy(2, [5], [4], KEYS[:1])])
        assert not here.ended(2)[2], "it loads nothing while it is left out"
        go_on.set()


def has_hanging_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Rank 2 opens its file when the event is set."""
    go_on, made = threading.Event(), disk.SlotFile.__init__

    def hangs(self: disk.SlotFile, folder: Path, *args: object) -> None:
        if folder.name == "rank2of4":
            assert go_on.wait(PATIENCE_S)
        made(self, folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.SlotFile, "__init__", hangs)
    monkeypatch.setattr(disk, "OPEN_S", 0.2)
    return go_on


def test_a_node_whose_rank_has_a_disk_that_does_not_answer_starts_without_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = has_hanging_disk(monkeypatch)
    with node(TierConfig(disk=str(tmp_path), size=1 << 20)) as here:
        assert "rank 2: its disk has not answered" in here.tier.status().left_out
        here.tier.mover.submit([STORE], [])
        assert here.tier.mover.take_ended() == {1: None}
        go_on.set()


def test_what_is_forgotten_while_a_rank_has_no_tier_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TierConfig(disk=str(tmp_path), size=1 << 20)
    with node(config) as here:
        here.tier.mover.submit([STORE], [])
        assert here.ended(1) == {1: True}
    with monkeypatch.context() as patched:
        go_on = has_hanging_disk(patched)
        with node(config) as here:
            here.tier.manager.reset()
            assert isinstance(here.tier.spec, TierOfRanks)
            recall = here.tier.spec.recall
            until(lambda: recall.all_written)
            go_on.set()
    with node(config) as again:
        assert again.tier.manager.lookup(KEYS) == 0


def test_a_copy_at_a_rank_that_has_ended_is_not_called_stored(config: TierConfig) -> None:
    with node(config) as here:
        here.tier.mover.submit([STORE], [])
        assert here.ended(1) == {1: True}
        here.ranks[1].stop(PATIENCE_S)
        here.tier.mover.submit([Copy(2, [1], [3], KEYS[:1])], [])
        assert not here.tier.mover.take_ended()


def test_a_thread_that_has_ranks_copy_and_died_is_not_waited_for(config: TierConfig) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with node(config) as here:
        here.lines.post(MakeCopies(0, [STORE], []), Broken())
        with pytest.raises(InternalError, match="illegal memory access"):
            until(lambda: here.tier.mover.take_ended() is None)


def test_a_disk_is_found_again_by_all_ranks_and_is_forgotten_by_all(tmp_path: Path) -> None:
    config = TierConfig(disk=str(tmp_path), size=1 << 20)
    load = Copy(5, [5, 6], [4, 0], KEYS)
    with node(config) as here:
        here.tier.mover.submit([STORE], [])
        assert here.ended(1) == {1: True}
    with node(config, caches(9.0)) as again:
        assert again.tier.manager.lookup(KEYS) == 2
        again.tier.mover.submit([], [load])
        assert again.ended(5) == {5: True}
        for memory, before in zip(again.memories, caches(), strict=True):
            assert torch.equal(memory.tensor[[5, 6]], before.tensor[[3, 7]])
        again.tier.manager.reset()
        again.tier.mover.submit([], [load])
        assert again.ended(5) == {5: False}
        # Stored again at all ranks; then rank 0's file is gone, and the others' are those of another time.
        again.tier.mover.submit([Copy(6, [3, 7], [4, 0], KEYS, 1)], [])
        assert again.ended(6) == {6: True}
        again.tier.mover.submit([], [Copy(7, [5, 6], [4, 0], KEYS, 1)])
        assert again.ended(7) == {7: True}
    for file in (tmp_path / "rank0of4").iterdir():
        file.unlink()
    with node(config) as third:
        assert third.tier.manager.lookup(KEYS) == 0
        third.tier.mover.submit([], [load])
        assert third.ended(5) == {5: False}, "what others have is of another generation"


def test_bytes_that_hold_no_block_of_all_ranks_are_refused() -> None:
    with (
        pytest.raises(ConfigurationError, match=f"which are {BLOCK_BYTES} bytes each on all ranks"),
        node(TierConfig(cpu=BLOCK_BYTES - 1)),
    ):
        pass


def test_what_a_rank_cannot_open_is_said_and_the_node_serves_without_it(tmp_path: Path) -> None:
    (tmp_path / "rank2of4").write_text("no folder")
    with node(TierConfig(disk=str(tmp_path), size=1 << 20)) as here:
        assert "rank2of4': File exists" in here.tier.status().left_out
        here.tier.mover.submit([STORE], [])
        assert here.tier.mover.take_ended() == {1: None}


def test_a_tier_of_another_kind_is_refused() -> None:
    with (
        pytest.raises(ConfigurationError, match="synthetic knows the KV of one rank"),
        node(TierConfig(spec="synthetic")),
    ):
        pass
