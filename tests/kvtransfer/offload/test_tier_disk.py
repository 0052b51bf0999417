"""The disk tier: which blocks survive a restart, and that no torn, old or foreign bytes are ever taken for KV."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.offload import disk
from tandem.kvtransfer.offload.disk import HEADER_BYTES, DiskManager, SlotFile, identity
from tandem.kvtransfer.offload.manager import StoreRoom
from tandem.kvtransfer.offload.patience import TierUnavailable
from tandem.kvtransfer.offload.spec import Copy, Tier, create_tier
from tandem.kvtransfer.sources import KeptSources
from tandem.wire.nodes import PeerAddress
from tests.kvtransfer.offload.kv_tiers import ended

PAGE = 4096
CHUNK = 3 * PAGE
SLOTS = 6
KEYS = [bytes([i]) * 32 for i in range(20)]
CRASHES = int(os.environ.get("TANDEM_CRASHES", "0"))
KILLS = int(os.environ.get("TANDEM_KILLS", "2"))


def chunk_of(key: bytes, era: int = 0) -> bytes:
    """The content of this key's KV, which no other key has; it differs after each time that the tier was emptied (`era`)."""
    return random.Random(key + bytes([era])).randbytes(CHUNK)


def open_file(folder: Path, name: str = "m") -> SlotFile:
    return SlotFile(folder, name, SLOTS, HEADER_BYTES + CHUNK)


def found_again(file: SlotFile, folder: Path) -> list[tuple[bytes, int]]:
    """What a restarted node finds in this file."""
    file.close()
    again = open_file(folder)
    content = again.content()
    again.close()
    return content


def memory(num_blocks: int = 16) -> KVCacheMemory:
    return KVCacheMemory(torch.rand(num_blocks, 2, 2, 3, 4, 8), "m", 2, 1, 100)


def tier_in(folder: Path, cache: KVCacheMemory, factor: int = 1, slots: int = 4) -> Tier:
    size = slots * (HEADER_BYTES + factor * cache.block_bytes)
    tier = create_tier(TierConfig(disk=str(folder), size=size, block_factor=factor))
    tier.open(cache, lambda: None)
    return tier


def store(tier: Tier, job: int, keys: list[bytes], blocks: list[int]) -> None:
    room = tier.manager.prepare_store(keys)
    assert room is not None
    factor = tier.block_factor
    places = [slot * factor + part for slot in room.slots for part in range(factor)]
    tier.mover.submit([Copy(job, blocks, places, room.keys)], [])
    assert ended(tier.mover, job) == {job: True}
    tier.manager.complete_store(room, written=True)


def load(tier: Tier, job: int, keys: list[bytes], blocks: list[int], skip: int = 0) -> bool:
    """Loads keys into `blocks`, from part `skip` of the first key's chunk on."""
    slots = tier.manager.prepare_load(keys)
    factor = tier.block_factor
    places = [slot * factor + part for slot in slots for part in range(factor)][skip:]
    tier.mover.submit([], [Copy(job, blocks, places, keys)])
    right = ended(tier.mover, job)[job]
    tier.manager.complete_load(slots)
    return bool(right)


def test_a_restarted_node_finds_what_was_stored(tmp_path: Path) -> None:
    cache = memory()
    before = cache.tensor.clone()
    tier = tier_in(tmp_path, cache, factor=2)
    store(tier, 0, [b"a" * 32, b"b" * 32], [3, 4, 9, 8])
    tier.close()
    cache.tensor.zero_()
    tier = tier_in(tmp_path, cache, factor=2)
    try:
        assert tier.manager.lookup([b"a" * 32, b"b" * 32, b"c" * 32]) == 2
        assert load(tier, 1, [b"a" * 32, b"b" * 32], [1, 2, 5], skip=1)
        assert (cache.tensor[[1, 2, 5]] == before[[4, 9, 8]]).all()
        assert tier.status().used_bytes == 4 * cache.block_bytes
    finally:
        tier.close()


def test_another_model_or_layout_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = {
        identity(memory(), 1),
        identity(memory(), 2),
        identity(KVCacheMemory(torch.rand(4, 2, 2, 3, 4, 8), "other", 2, 1, 100), 1),
        identity(KVCacheMemory(torch.rand(4, 2, 2, 3, 8, 8), "m", 2, 1, 100), 1),
        identity(KVCacheMemory(torch.rand(4, 2, 2, 3, 4, 8).half(), "m", 2, 1, 100), 1),
        identity(KVCacheMemory(torch.rand(4, 2, 2, 4, 3, 8).transpose(3, 4), "m", 2, 1, 100), 1),
        identity(KVCacheMemory(torch.rand(4, 2, 2, 3, 4, 8), "m", 2, 2, 100, state_blocks=3), 1),
        identity(KVCacheMemory(torch.rand(4, 2, 2, 3, 4, 8), "m", 2, 2, 100, state_blocks=4), 1),
    }
    assert len(names) == 8
    assert identity(memory(8), 1) == identity(memory(16), 1), "the size of the device's pool does not matter"


def test_two_processes_take_a_file_each_and_find_it_again(tmp_path: Path) -> None:
    first, second = open_file(tmp_path), open_file(tmp_path)
    first.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    second.write(0, KEYS[1], memoryview(chunk_of(KEYS[1])), 0)
    first.close()
    second.close()
    files = [open_file(tmp_path), open_file(tmp_path)]
    assert [file.content() for file in files] == [[(KEYS[0], 0)], [(KEYS[1], 0)]]
    for file in files:
        file.close()


def test_what_was_forgotten_is_not_found_after_a_restart_nor_what_was_on_its_way(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    manager = DiskManager(SLOTS, EvictionPolicy.LRU, file)
    file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    manager.reset()
    file.write(1, KEYS[1], memoryview(chunk_of(KEYS[1])), 0)  # planned before
    file.write(2, KEYS[2], memoryview(chunk_of(KEYS[2])), 1)
    into = memoryview(bytearray(CHUNK))
    assert [file.read(slot, KEYS[slot], into) for slot in range(3)] == [False, False, True]
    assert found_again(file, tmp_path) == [(KEYS[2], 2)]


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def expect_full_disk(work: Callable[[], object]) -> None:
    """While it runs, nothing can be written."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk.os, "pwrite", full_disk)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="No space"):
            work()


def test_what_a_full_disk_was_to_forget_is_not_found_after_a_restart(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    assert file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    expect_full_disk(file.forget_all)
    assert found_again(file, tmp_path) == []


def test_what_is_stored_after_a_full_disk_was_emptied_is_found_after_a_restart(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    assert file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    expect_full_disk(lambda: file.forget({KEYS[0]}))
    file.forget({KEYS[0]})  # it is tried again
    assert file.write(1, KEYS[1], memoryview(chunk_of(KEYS[1])), 0)
    assert found_again(file, tmp_path) == [(KEYS[1], 1)]


def test_what_is_stored_after_everything_was_forgotten_at_the_second_try_is_read(tmp_path: Path) -> None:
    file, into = open_file(tmp_path), memoryview(bytearray(CHUNK))
    expect_full_disk(file.forget_all)
    file.forget_all()  # it is tried again
    assert file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 1)
    assert file.read(0, KEYS[0], into)
    assert found_again(file, tmp_path) == [(KEYS[0], 0)]


def test_a_key_that_a_failed_write_has_left_in_its_slot_can_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(tmp_path)
    assert file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "pwrite", full_disk)  # type: ignore[attr-defined]
        assert not file.write(0, KEYS[1], memoryview(chunk_of(KEYS[1])), 0)
    file.forget({KEYS[0]})
    assert found_again(file, tmp_path) == []


def test_a_disk_that_fails_once_while_it_is_opened_says_why_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(tmp_path)
    assert file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    file.close()
    pread = os.pread

    def unreadable(number: int, count: int, start: int) -> bytes:
        if start >= HEADER_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        return pread(number, count, start)

    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "pread", unreadable)  # type: ignore[attr-defined]
        with pytest.raises(TierUnavailable, match=r"disk .*Input/output error"):
            open_file(tmp_path)
    assert found_again(open_file(tmp_path), tmp_path) == [(KEYS[0], 0)]


def test_a_key_that_was_forgotten_does_not_come_back_with_a_restart(tmp_path: Path) -> None:
    """Also from a slot where it was evicted before, and from a store that was in line."""
    void: set[int] = set()
    file = SlotFile(tmp_path, "m", SLOTS, HEADER_BYTES + CHUNK, void)
    manager = DiskManager(SLOTS, EvictionPolicy.LRU, file, void)

    def write(room: StoreRoom | None) -> bool:
        assert room is not None
        written = [
            file.write(slot, key, memoryview(chunk_of(key)), 0) for key, slot in zip(room.keys, room.slots, strict=True)
        ]
        manager.complete_store(room, written=all(written))
        return all(written)

    for key in KEYS[: SLOTS + 2]:  # the first two are evicted
        assert write(manager.prepare_store([key]))
    assert write(manager.prepare_store(KEYS[2:4]))  # nothing to do
    in_line = manager.prepare_store(KEYS[10:11])
    manager.forget([KEYS[1], KEYS[4], KEYS[10]])
    assert not write(in_line)
    assert write(manager.prepare_store(KEYS[10:11])), "what is computed later is stored"
    manager.check_integrity()
    found = {key for key, _ in found_again(file, tmp_path)}
    assert {KEYS[5], KEYS[6], KEYS[7], KEYS[10]} <= found
    assert not {KEYS[1], KEYS[4]} & found


@pytest.mark.parametrize("harm", ["", "torn", "of another generation"])
def test_a_file_of_sources_that_is_torn_leaves_nothing_and_one_of_before_says_nothing(
    tmp_path: Path, harm: str
) -> None:
    file = open_file(tmp_path)
    kept = KeptSources(copied=[(PeerAddress("a", 1, "tcp://a"), 3)])
    file.keep_sources(kept)
    if harm == "of another generation":
        file.forget_all()
    file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), int(harm == "of another generation"))
    file.close()
    if harm == "torn":
        path = tmp_path / "m-0.sources"
        path.write_bytes(path.read_bytes()[:-3])
    file = open_file(tmp_path)
    assert file.sources == (kept if not harm else KeptSources())
    assert len(file.content()) == (0 if harm == "torn" else 1)
    file.close()


def test_a_slot_that_was_moved_or_holds_another_key_is_not_read(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.write(0, KEYS[0], memoryview(chunk_of(KEYS[0])), 0)
    whole = (tmp_path / "m-0.kv").read_bytes()
    slot = HEADER_BYTES + CHUNK
    with (tmp_path / "m-0.kv").open("r+b") as raw:
        raw.seek(HEADER_BYTES + slot)
        raw.write(whole[HEADER_BYTES : HEADER_BYTES + slot])
    into = memoryview(bytearray(CHUNK))
    assert not file.read(1, KEYS[0], into)
    assert not file.read(0, KEYS[1], into)
    assert file.read(0, KEYS[0], into)
    file.close()


def test_a_disk_without_room_for_one_entry_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no room for one entry"):
        create_tier(TierConfig(disk=str(tmp_path), size=100)).open(memory(), lambda: None)


class Crashes:
    """Records every write. After a crash the file keeps a random part of the pages that were not synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: bytes = b"") -> None:
        """`before`: the file's content."""
        self.before = before
        self.writes: list[tuple[int, bytes]] = []
        self.synced = 0
        pwrite, fdatasync = os.pwrite, os.fdatasync

        def noted(file: int, content: bytes | memoryview, offset: int) -> int:
            self.writes.append((offset, bytes(content)))
            return pwrite(file, content, offset)

        def synced(file: int) -> None:
            fdatasync(file)
            self.synced = len(self.writes)

        monkeypatch.setattr(disk.os, "pwrite", noted)  # type: ignore[attr-defined]
        monkeypatch.setattr(disk.os, "fdatasync", synced)  # type: ignore[attr-defined]

    def image(self, size: int, draw: random.Random) -> bytearray:
        image = bytearray(self.before.ljust(size, b"\0"))
        last = draw.randint(self.synced, len(self.writes))
        for number, (offset, content) in enumerate(self.writes[:last]):
            for start in range(0, len(content), PAGE):
                if number < self.synced or draw.random() < 0.7:
                    piece = content[start : start + PAGE]
                    image[offset + start : offset + start + len(piece)] = piece
        return image


FILE_BYTES = HEADER_BYTES + SLOTS * (HEADER_BYTES + CHUNK)


class DiskIndex(RuleBasedStateMachine):
    """The manager over its file: every block that it reports is in the file and right, or after a crash is refused when it is read. A file
    crashes again and again, and what was written between two crashes lies among what was left. TANDEM_CRASHES: about so many more."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._folder = tempfile.TemporaryDirectory()
        # Under way, and what had been forgotten when they were planned
        self._stores: list[tuple[StoreRoom, int]] = []
        self._torn: set[bytes] = set()  # by a crash, maybe
        self.era = 0
        self._begin(b"")

    def _begin(self, left: bytes) -> None:
        self._patch.undo()
        path = Path(self._folder.name)
        if left:
            (path / "m-0.kv").write_bytes(left)
        self._crashes = Crashes(self._patch, left)
        self._file = open_file(path)
        self._manager = DiskManager(SLOTS, EvictionPolicy.LRU, self._file)
        self._resets, self._stores = 0, []

    def teardown(self) -> None:
        self._file.close()
        self._patch.undo()
        self._folder.cleanup()

    @rule(keys=st.lists(st.sampled_from(KEYS[:9]), min_size=1, max_size=3, unique=True))
    def plan_a_store(self, keys: list[bytes]) -> None:
        room = self._manager.prepare_store(keys)
        if room is not None:
            self._stores.append((room, self._resets))

    @precondition(lambda self: self._stores)
    @rule(data=st.data(), written=st.booleans())
    def end_a_store(self, data: st.DataObject, written: bool) -> None:
        room, resets = self._stores.pop(data.draw(st.integers(0, len(self._stores) - 1)))
        for key, slot in zip(room.keys, room.slots, strict=True):
            # The bytes are those of when it was planned, also where everything was forgotten since.
            made = chunk_of(key, self.era - self._resets + resets)
            if written:
                self._torn.discard(key)
                self._file.write(slot, key, memoryview(made), resets)
        self._manager.complete_store(room, written=written)

    @rule()
    def forget(self) -> None:
        self._manager.reset()
        self._resets, self.era = self._resets + 1, self.era + 1

    @rule(seed=st.integers(0, 1 << 30))
    def crash(self, seed: int) -> None:
        image = bytes(self._crashes.image(FILE_BYTES, random.Random(seed)))
        self._file.close()
        self._begin(image)
        self._torn = {key for key, _ in self._file.content()}

    @rule()
    def restart(self) -> None:
        self._file.close()
        self._begin(bytes(self._crashes.image(FILE_BYTES, Whole())))

    @invariant()
    def what_is_there_is_right(self) -> None:
        into = memoryview(bytearray(CHUNK))
        for key in KEYS[:9]:
            if not self._manager.lookup([key]):
                continue
            (slot,) = self._manager.prepare_load([key])
            read = self._file.read(slot, key, into)
            self._manager.complete_load([slot])
            assert read or key in self._torn, "what was stored and not lost cannot be read"
            assert not read or bytes(into) == chunk_of(key, self.era), "it is another's, or was forgotten"


class Whole(random.Random):
    """A source of chance by which a crash loses nothing."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 0.0


TestDiskIndex = DiskIndex.TestCase
TestDiskIndex.settings = settings(max_examples=40 + CRASHES // 4, stateful_step_count=30, deadline=None)


_WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_tier_disk import KEYS, SLOTS, chunk_of, open_file
file, draw = open_file(Path({folder!r})), random.Random({seed})
chunks = {{key: memoryview(chunk_of(key)) for key in KEYS}}
while True:
    key = draw.choice(KEYS)
    file.write(draw.randrange(SLOTS), key, chunks[key], 0)
    print("written", flush=True)
"""


@pytest.mark.slow
def test_a_node_killed_while_it_stores_leaves_nothing_wrong(tmp_path: Path) -> None:
    """In the middle of its writes, some of them into what the one before it left. Set TANDEM_KILLS for more of them."""
    read, draw = 0, random.Random(7)
    into = memoryview(bytearray(CHUNK))
    for seed in range(KILLS):
        folder = tmp_path / str(seed // 2)
        script = _WRITER.format(here=str(Path(__file__).parent), folder=str(folder), seed=seed)
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        try:
            for _ in range(draw.randrange(1, 40)):
                assert writer.stdout.readline() == b"written\n"
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        file = open_file(folder)
        for key, slot in file.content():
            if file.read(slot, key, into):
                assert bytes(into) == chunk_of(key)
                read += 1
        file.close()
    assert read
