"""A disk whose calls do not return, or are slow: what is given up, for how long the tier is left out, and that it loses nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload import disk
from tandem.kvtransfer.offload.cpu import Copier, CopyThread, TierSurroundings
from tandem.kvtransfer.offload.disk import HEADER_BYTES, DiskTier, SlotFile
from tandem.kvtransfer.offload.files import SystemFile, SystemFiles
from tandem.kvtransfer.offload.patience import (
    FIRST_OUT_S,
    LEAST_LOAD_S,
    LOADS_TO_TRUST,
    MOST_OUT_S,
    Absence,
    GivenUp,
    Hold,
)
from tandem.kvtransfer.offload.spec import Copy, Tier
from tests.clock import Clock
from tests.kvtransfer.offload.kv_tiers import PATIENCE_S, ended
from tests.waiting import until

KEYS = [bytes([i]) * 32 for i in range(4)]


class Disk:
    """Calls of a `SlotFile` that the test lets return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.entered = threading.Event()
        self._patch = monkeypatch

    def hang(self, *names: str) -> None:
        self.go_on.clear()
        self.entered.clear()
        for name in names:
            self._patch.setattr(SlotFile, name, self._hanging(getattr(SlotFile, name)))

    def _hanging(self, call: Callable[..., object]) -> Callable[..., object]:
        def hangs(*args: object) -> object:
            self.entered.set()
            assert self.go_on.wait(PATIENCE_S)
            return call(*args)

        return hangs


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.go_on.set()


class Tiers:
    """Tiers of one node, one after the other, on a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "kv"
        self.cache = KVCacheMemory(torch.rand(16, 2, 2, 3, 4, 8), "m", 2, 1, 100)
        self.clock = Clock()
        self.tier: Tier | None = None

    def open(self) -> Tier:
        self.close()
        config = TierConfig(disk=str(self.folder), size=8 * (HEADER_BYTES + self.cache.block_bytes))
        self.tier = Tier(DiskTier(config, TierSurroundings(self._thread)), config.block_factor)
        self.tier.open(self.cache, lambda: None)
        return self.tier

    def _thread(self, copier: Copier, wake: Callable[[], None], name: str) -> CopyThread:
        return CopyThread(copier, wake, name, self.clock)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.close()


def thread_of(tier: Tier) -> CopyThread:
    assert isinstance(tier.mover, CopyThread)
    return tier.mover


def store(tier: Tier, job: int, keys: list[bytes], blocks: list[int]) -> None:
    room = tier.manager.prepare_store(keys)
    assert room is not None
    tier.mover.submit([Copy(job, blocks, room.slots, room.keys)], [])
    assert ended(tier.mover, job) == {job: True}
    tier.manager.complete_store(room, written=True)


def test_copies_that_a_full_disk_refuses_are_counted(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tiers.open()
    room = tier.manager.prepare_store(KEYS[:1])
    assert room is not None

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    tier.mover.submit([Copy(1, [1], room.slots, room.keys)], [])
    assert ended(tier.mover, 1) == {1: False}
    assert (tier.status().given_up, tier.status().stored_bytes) == (1, 0)


def test_a_read_that_does_not_return_is_given_up_and_writes_to_no_block_later(tiers: Tiers, hung: Disk) -> None:
    tier, cache, clock = tiers.open(), tiers.cache, tiers.clock
    store(tier, 0, KEYS[:2], [1, 2])
    hung.hang("read")
    slots = tier.manager.prepare_load(KEYS[:1])
    tier.mover.submit([], [Copy(1, [5], slots, KEYS[:1], within_s=LEAST_LOAD_S)])
    assert hung.entered.wait(PATIENCE_S)
    tier.mover.submit([Copy(2, [7], [5], [KEYS[3]])], [Copy(3, [6], slots, KEYS[:1], within_s=2 * LEAST_LOAD_S)])
    thread_of(tier).look()
    assert not tier.mover.take_ended(), "its time is not over"
    clock.now += LEAST_LOAD_S
    thread_of(tier).look()
    assert tier.mover.take_ended() == {1: None, 2: None, 3: None}, "what is behind it, too"
    tier.manager.complete_load(slots)
    assert "not done in its time" in tier.status().left_out
    assert tier.status().given_up == 3
    before = cache.tensor.clone()
    hung.go_on.set()
    clock.now += FIRST_OUT_S
    tier.mover.submit([], [])
    until(lambda: not tier.mover.left_out)
    assert torch.equal(cache.tensor, before)
    assert tier.manager.lookup(KEYS) == 2, "nothing is lost"
    slots = tier.manager.prepare_load(KEYS[:2])
    tier.mover.submit([], [Copy(4, [5, 6], slots, KEYS[:2])])
    assert ended(tier.mover, 4) == {4: True}
    assert torch.equal(cache.tensor[[5, 6]], before[[1, 2]])


@pytest.mark.parametrize("call", ["write", "forget_all"])
def test_a_write_that_does_not_return_holds_no_block(tiers: Tiers, hung: Disk, call: str) -> None:
    tier, clock = tiers.open(), tiers.clock
    store(tier, 0, KEYS[:1], [1])
    hung.hang(call)
    if call == "forget_all":
        tier.manager.reset()  # returns all the same
        assert hung.entered.wait(PATIENCE_S)
        assert tier.manager.lookup(KEYS[:1]) == 0
    tier.mover.submit([Copy(1, [2], [3], [KEYS[1]], resets=int(call == "forget_all"))], [])
    assert hung.entered.wait(PATIENCE_S)
    clock.now += 100.0
    thread_of(tier).look()
    assert tier.mover.take_ended() == {1: None}
    tiers.close()  # does not wait for it


def test_a_tier_that_is_forgotten_while_its_disk_hangs_is_empty_at_the_next_start(tiers: Tiers, hung: Disk) -> None:
    tier = tiers.open()
    store(tier, 0, KEYS[:1], [1])
    hung.hang("read")
    slots = tier.manager.prepare_load(KEYS[:1])
    tier.mover.submit([], [Copy(1, [5], slots, KEYS[:1])])
    assert hung.entered.wait(PATIENCE_S)
    tier.manager.reset()
    hung.go_on.set()
    tier = tiers.open()
    assert tier.manager.lookup(KEYS[:1]) == 0


def test_a_node_starts_while_its_disk_hangs_and_finds_what_is_there_when_it_answers(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, hung: Disk
) -> None:
    tier = tiers.open()
    store(tier, 0, KEYS[:2], [1, 2])
    tiers.close()
    monkeypatch.setattr(disk, "OPEN_S", 0.05)
    hung.hang("__init__")
    tier = tiers.open()
    assert "not answered since the start" in tier.status().left_out
    tier.mover.submit([Copy(1, [2], [3], [KEYS[2]])], [])
    assert tier.mover.take_ended() == {1: None}
    hung.go_on.set()
    until(lambda: not tier.mover.left_out)
    assert tier.manager.lookup(KEYS) == 2


@pytest.mark.parametrize("harm", ["full", "gone", "broken"])
def test_a_node_starts_while_its_disk_cannot_be_used_and_finds_what_is_there_when_it_can(
    tmp_path: Path, tiers: Tiers, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """A tier is only a cache: without this, the end of a node on a machine whose disk is full would be the end of its service."""
    tier, clock, folder = tiers.open(), tiers.clock, tiers.folder
    store(tier, 0, KEYS[:2], [1, 2])
    tiers.close()

    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        if harm == "full":
            patched.setattr(SystemFile, "allocated_bytes", 0)
            patched.setattr(SystemFiles, "free_bytes", lambda *_: 0)
        elif harm == "gone":
            folder.rename(tmp_path / "away")
            folder.write_text("of something else")
        else:
            patched.setattr(SystemFile, "read", broken)
        tier = tiers.open()
        why = {"full": "0 MiB are left", "gone": "File exists", "broken": "Input/output error"}[harm]
        assert why in tier.status().left_out
        tier.mover.submit([Copy(1, [2], [3], [KEYS[2]])], [])
        assert tier.mover.take_ended() == {1: None}
    if harm == "gone":
        folder.unlink()
        (tmp_path / "away").rename(folder)
    clock.now += FIRST_OUT_S
    tier.mover.submit([], [])
    until(lambda: not tier.mover.left_out)
    assert tier.manager.lookup(KEYS) == 2


def test_a_tier_that_could_never_be_opened_ends_without_delay(tiers: Tiers) -> None:
    tiers.folder.write_text("x")
    tier = tiers.open()
    tier.manager.reset()
    tiers.close()
    until(lambda: not any(thread.is_alive() for thread in thread_of(tier)._threads))


def test_several_that_find_at_once_that_a_tier_does_not_work_leave_it_out_once(tiers: Tiers) -> None:
    """As the threads that ask an object store do when it hangs."""
    tier, clock = tiers.open(), tiers.clock
    for _ in range(4):
        tier.mover.leave_out("it did not answer in time")
    clock.now += FIRST_OUT_S
    tier.mover.submit([], [])
    until(lambda: not tier.mover.left_out)


def test_a_tier_that_ends_while_it_is_left_out_lets_its_file_go(tiers: Tiers) -> None:
    """As when a node changes its role: the next one is in the same process."""
    tier = tiers.open()
    store(tier, 0, KEYS[:2], [1, 2])
    tier.mover.leave_out("a load was not done in its time")
    until(lambda: bool(tier.mover.left_out))
    tier = tiers.open()
    assert tier.manager.lookup(KEYS) == 2


def test_a_store_that_waits_too_long_is_dropped_and_the_tier_goes_on(tiers: Tiers, hung: Disk) -> None:
    """A disk that cannot keep up with what is computed is no reason to leave it out."""
    tier, clock = tiers.open(), tiers.clock
    hung.hang("write")
    tier.mover.submit([Copy(1, [1], [0], KEYS[:1], within_s=100.0)], [])
    assert hung.entered.wait(PATIENCE_S)
    tier.mover.submit([Copy(2, [2], [1], KEYS[1:2])], [])
    clock.now += 50.0
    thread_of(tier).look()
    assert tier.mover.take_ended() == {2: None}
    assert not tier.mover.left_out
    hung.go_on.set()
    assert ended(tier.mover, 1) == {1: True}


def test_a_copy_that_is_given_up_touches_no_block() -> None:
    hold = Hold()
    with hold:
        assert not hold.give_up(), "it touches them now"
    assert hold.give_up()
    with pytest.raises(GivenUp), hold:
        pytest.fail("the copy goes on")


def test_a_tier_is_left_out_for_twice_as_long_each_time_until_it_is_trusted_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    absence = Absence("disk", clock)
    lasted = []
    for _ in range(9):
        absence.leave_out("it hangs")
        lasted.append(absence.until - clock.now)
        absence.end()
        for _ in range(LOADS_TO_TRUST - 1):  # small ones come in time
            absence.loaded_in_time()
    assert lasted == [FIRST_OUT_S * 2**n for n in range(7)] + [MOST_OUT_S] * 2
    absence.loaded_in_time()
    absence.leave_out("it hangs")
    assert absence.until - clock.now == FIRST_OUT_S
    assert "the disk tier is left out: it hangs. It is tried again in 10 s" in caplog.text
    assert "answers again" in caplog.text
