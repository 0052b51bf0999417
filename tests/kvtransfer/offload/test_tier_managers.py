"""What a tier holds and what it evicts: random operations, compared with the plain rules."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.offload.cpu import Copier, CopyThread, CpuTier, HostCopier
from tandem.kvtransfer.offload.manager import LEAST_TRACKED, ReuseFilter, SlotManager, StoreRoom
from tandem.kvtransfer.offload.patience import Hold
from tandem.kvtransfer.offload.policies import ArcPolicy
from tandem.kvtransfer.offload.spec import Copy, create_tier
from tandem.kvtransfer.protocol.transport import runs_of
from tests.kvtransfer.offload.kv_tiers import ended

CAPACITY = 5
KEYS = [bytes([i]) for i in range(10)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)


class Machine(RuleBasedStateMachine):
    """The rules: a chunk that is being written cannot be found, one that is being read cannot be evicted, a store gets all its room or none,
    and every slot is in exactly one list."""

    policy = EvictionPolicy.LRU

    def __init__(self) -> None:
        super().__init__()
        self.manager = SlotManager(CAPACITY, self.policy)
        self.manager.note_changes()
        self.told: set[bytes] = set()  # what is ready, by the changes that were told
        self.content: dict[int, bytes] = {}  # slot -> whose bytes it has, once they are written
        self.stores: list[StoreRoom] = []
        self.loads: list[tuple[list[bytes], list[int]]] = []
        self.forgotten: set[int] = set()  # slots whose store or load was under way then

    def slots_under_way(self) -> Counter[int]:
        read = Counter(slot for _, slots in self.loads for slot in slots)
        return read + Counter(slot for room in self.stores for slot in room.slots)

    @rule(keys=some_keys)
    def touch(self, keys: list[bytes]) -> None:
        self.manager.touch(keys)

    @rule(keys=some_keys)
    def line_up(self, keys: list[bytes]) -> None:
        self.manager.line_up(keys)

    @rule(keys=some_keys)
    def store(self, keys: list[bytes]) -> None:
        there = [key for key in keys if self.manager.policy.get(key) is not None]
        before = sorted(self.manager.policy.all_keys())
        idle = [key for key in before if not self.manager.busy[self.manager.policy.get(key) or 0] and key not in keys]
        room = self.manager.prepare_store(keys)
        needed = len(keys) - len(there)
        if room is None:
            assert needed > CAPACITY - self.manager.used + len(idle)
            assert sorted(self.manager.policy.all_keys()) == before
            return
        assert room.keys == [key for key in keys if key not in there]
        assert self.slots_under_way().keys().isdisjoint(room.slots), "a slot in use was given away"
        assert self.manager.lookup(room.keys) == 0, "what is not written yet was found"
        for slot in room.slots:
            self.content.pop(slot, None)
        self.stores.append(room)

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, 9), written=st.booleans())
    def end_store(self, which: int, written: bool) -> None:
        room = self.stores.pop(which % len(self.stores))
        if written:
            self.content.update(zip(room.slots, room.keys, strict=True))
        self.manager.complete_store(room, written=written)
        for key, slot in zip(room.keys, room.slots, strict=True):
            found = self.manager.lookup([key]) == 1
            assert found == (written and slot not in self.forgotten) or self.manager.policy.get(key) != slot
        self.forgotten -= set(room.slots)

    @rule(keys=some_keys)
    def load(self, keys: list[bytes]) -> None:
        found = self.manager.lookup(keys)
        slots = self.manager.prepare_load(keys[:found])
        for key, slot in zip(keys[:found], slots, strict=True):
            assert self.content[slot] == key, "another key's bytes would be loaded"
        self.loads.append((keys[:found], slots))

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 9))
    def end_load(self, which: int) -> None:
        keys, slots = self.loads.pop(which % len(self.loads))
        for key, slot in zip(keys, slots, strict=True):
            assert self.content[slot] == key, "it was overwritten while it was read"
        self.manager.complete_load(slots)
        self.forgotten -= set(slots) - self.slots_under_way().keys()

    @rule(keys=some_keys)
    def forget(self, keys: list[bytes]) -> None:
        slots = {slot for key in keys if (slot := self.manager.policy.get(key)) is not None}
        self.forgotten |= slots & self.slots_under_way().keys()
        self.manager.forget(keys)
        assert all(self.manager.lookup([key]) == 0 for key in keys)

    @rule()
    def reset(self) -> None:
        self.forgotten |= self.slots_under_way().keys()
        self.manager.reset()
        assert self.manager.used == len(self.slots_under_way())

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def the_changes_tell_what_is_ready(self) -> None:
        for key, is_ready in self.manager.take_changes():
            assert (key in self.told) != is_ready
            (self.told.add if is_ready else self.told.discard)(key)
        assert self.told == {key for key in KEYS if self.manager.lookup([key])}
        under_way = self.slots_under_way()
        for slot in range(CAPACITY):
            writes = any(slot in room.slots for room in self.stores)
            assert self.manager.busy[slot] == (-1 if writes else under_way[slot])
        policy = self.manager.policy
        if isinstance(policy, ArcPolicy):
            assert 0 <= policy.target <= CAPACITY
            assert len(policy.gone_recent) <= CAPACITY
            assert len(policy.gone_frequent) <= CAPACITY
            lists = [policy.recent, policy.frequent, policy.gone_recent, policy.gone_frequent]
            assert sum(map(len, lists)) == len(set().union(*lists)), "a key is in two lists"


class ArcMachine(Machine):
    policy = EvictionPolicy.ARC


SHORT = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestLru = Machine.TestCase
TestLru.settings = SHORT
TestArc = ArcMachine.TestCase
TestArc.settings = SHORT


def stored(manager: SlotManager, *keys: bytes) -> None:
    room = manager.prepare_store(keys)
    assert room is not None
    manager.complete_store(room, written=True)


def test_lru_gives_up_the_end_of_the_oldest_prefix_first() -> None:
    manager = SlotManager(4, EvictionPolicy.LRU)
    stored(manager, b"a1", b"a2")
    stored(manager, b"b1", b"b2")
    manager.touch([b"a1", b"a2"])
    stored(manager, b"c1")
    assert [manager.lookup([key]) for key in (b"a1", b"a2", b"b1", b"b2")] == [1, 1, 1, 0]
    assert manager.evicted == 1


def test_arc_keeps_what_is_used_again_from_a_scan_and_lru_does_not() -> None:
    kept = {}
    for policy in EvictionPolicy:
        manager = SlotManager(8, policy)
        stored(manager, b"hot1", b"hot2")
        manager.touch([b"hot1", b"hot2"])
        for i in range(40):
            stored(manager, b"scan%d" % i)
        kept[policy] = manager.lookup([b"hot1", b"hot2"])
    assert kept == {EvictionPolicy.LRU: 0, EvictionPolicy.ARC: 2}


def test_arc_moves_its_target_by_what_it_gave_up_too_soon() -> None:
    policy = ArcPolicy(2, [0, 0, 0, 0])
    for slot, key in enumerate((b"a", b"b")):
        policy.insert(key, slot)
    assert policy.evict(1, ()) == [(b"a", 0)]
    policy.touch([b"a"])
    assert policy.target == 1.0
    policy.touch([b"b"])
    assert policy.evict(1, ()) == [(b"b", 1)]
    policy.touch([b"b"])
    assert policy.target == 0.0


def test_the_reuse_filter_stores_what_comes_again_and_remembers_no_more_than_it_may() -> None:
    manager = ReuseFilter(SlotManager(4, EvictionPolicy.LRU), threshold=2, tracked=3)
    manager.touch([b"a", b"b"])
    assert manager.prepare_store([b"a", b"b"]) == StoreRoom([], [])
    manager.touch([b"a"])
    room = manager.prepare_store([b"a", b"b"])
    assert room is not None
    assert room.keys == [b"a"]
    for key in (b"c", b"d", b"e"):  # now "a" and "b" are forgotten
        manager.touch([key])
    manager.touch([b"b"])
    assert manager.prepare_store([b"b"]) == StoreRoom([], [])


def test_the_reuse_filter_counts_for_as_many_keys_as_its_tier_has_room_for() -> None:
    """Else a key that comes again after so many others would never be stored, though it would stay that long."""
    slots = LEAST_TRACKED + 1000
    manager = ReuseFilter(SlotManager(slots, EvictionPolicy.LRU), threshold=2)
    for number in range(slots):
        manager.touch([number.to_bytes(4, "big")])
    first = (0).to_bytes(4, "big")
    manager.touch([first])
    room = manager.prepare_store([first])
    assert room is not None
    assert room.keys == [first]


def test_misuse_is_an_error() -> None:
    manager = SlotManager(1, EvictionPolicy.LRU)
    with pytest.raises(InternalError, match="has not got"):
        manager.prepare_load([b"a"])
    stored(manager, b"a")
    with pytest.raises(InternalError, match="more often"):
        manager.complete_load([0])
    with pytest.raises(InternalError, match="not being written"):
        manager.complete_store(StoreRoom([b"a"], [0]), written=True)


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
