"""The block pool: blocks are allocated, shared, freed, found again and evicted."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.base.errors import InternalError
from tandem.engine.cache.pool import BlockPool, FreeBlockQueue, Residency, ResidencyTotals


def free(pool: BlockPool) -> list[int]:
    return list(pool.free_queue)


def test_the_null_block_is_nobodys_and_never_free():
    pool = BlockPool(4)
    assert free(pool) == [1, 2, 3]
    assert pool.num_usable == 3
    pool.touch([0])
    pool.release([0, 0])
    assert free(pool) == [1, 2, 3]
    with pytest.raises(InternalError):
        pool.cache(0, 0, b"hash")
    pool.check_integrity([])
    with pytest.raises(InternalError, match="one more"):
        BlockPool(1)


def test_a_shared_block_is_free_when_the_last_has_left():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.touch([block])
    pool.release([block])
    assert block not in pool.free_queue
    pool.check_integrity([[block]])
    pool.release([block])
    assert block in pool.free_queue
    with pytest.raises(InternalError, match="more often"):
        pool.release([block])


def test_a_block_that_nobody_uses_is_found_until_it_is_taken():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.cache(0, block, b"h")
    pool.release([block])
    assert pool.lookup(0, b"h") == block
    pool.take(2)
    assert pool.lookup(0, b"h") == block
    assert pool.take(1) == [block]  # the last that was free
    assert pool.lookup(0, b"h") is None
    assert pool.num_cached == 0


def test_a_found_block_leaves_the_line_of_eviction():
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.cache(0, blocks[1], b"h")
    pool.release(blocks)
    assert pool.num_free_among([*blocks, 0]) == 3
    pool.touch([blocks[1]])
    assert free(pool) == [blocks[0], blocks[2]]
    assert pool.num_free_among(blocks) == 2
    pool.check_integrity([[blocks[1]]])


def test_copies_are_kept_and_the_first_is_the_one_that_is_found():
    pool = BlockPool(5)
    first, second, third = pool.take(3)
    for block in (first, second, third):
        pool.cache(0, block, b"h")
    for block, found in ((None, first), (first, second), (third, second), (second, None), (second, None)):
        if block is not None:
            pool.uncache(block)  # the last one twice, which does no harm
        assert pool.lookup(0, b"h") == found
    pool.check_integrity([[first, second, third]])


def test_groups_find_only_their_own():
    pool = BlockPool(4, num_groups=2)
    one, other = pool.take(2)
    pool.cache(0, one, b"h")
    assert pool.lookup(1, b"h") is None
    pool.cache(1, other, b"h")
    assert (pool.lookup(0, b"h"), pool.lookup(1, b"h")) == (one, other)
    pool.uncache(one)
    assert pool.lookup(1, b"h") == other


def test_a_block_is_filed_once_and_a_run_ends_at_the_first_miss():
    pool = BlockPool(6)
    blocks = pool.take(3)
    for block, name in zip(blocks, (b"a", b"b", b"d"), strict=True):
        pool.cache(0, block, name)
    assert pool.lookup_run(0, [b"a", b"b", b"c", b"d"]) == blocks[:2]
    assert pool.lookup_run(0, []) == []
    with pytest.raises(InternalError, match="twice"):
        pool.cache(0, blocks[0], b"other")


def test_everything_is_forgotten_and_what_is_used_stays_its_owners():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.cache(0, block, b"h")
    pool.reset()
    assert pool.lookup(0, b"h") is None
    pool.check_integrity([[block]])
    (other,) = pool.take(1)
    assert other != block
    pool.cache(0, other, b"h")
    pool.release([block, other])
    assert pool.lookup(0, b"h") == other
    pool.check_integrity([])


def test_the_garbage_collector_has_nothing_to_walk_in_a_pool():
    """Or each of its passes would take as long as the pool is large, in the middle of a step."""
    pool = BlockPool(1000)
    for block in pool.take(500):
        pool.cache(0, block, block.to_bytes(2, "big"))
    found: list[object] = [pool]
    for each in found:  # all that it would walk to, but for code
        found += [other for other in gc.get_referents(each) if gc.is_tracked(other) and not callable(other)]
        assert len(found) < 100


def test_how_long_blocks_stay_is_timed():
    now = 0.0
    pool = BlockPool(3)
    pool.residency = Residency(3, lambda: now)
    first, second = pool.take(2)
    for block in (first, second):
        pool.cache(0, block, bytes([block]))
    now = 10.0
    pool.release([first, second])
    now = 14.0
    pool.touch([first])
    now = 15.0
    pool.release([first])
    totals = pool.residency.totals
    assert (totals.reuses_timed, totals.reused_after_seconds) == (1, 4.0)
    now = 25.0
    pool.take(2)
    assert (totals.blocks_evicted, totals.evictions_timed) == (2, 2)
    assert totals.evicted_after_seconds == 50.0
    assert totals.evicted_idle_seconds == (25 - 10) + (25 - 15)


def test_what_is_forgotten_counts_as_no_eviction():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block in blocks:
        pool.cache(0, block, bytes([block]))
    pool.uncache(blocks[0])
    pool.reset()
    pool.release(blocks)
    pool.take(3)
    assert pool.residency.totals == ResidencyTotals()


def test_a_large_pool_times_a_share_of_its_blocks():
    pool = BlockPool(100_000)
    blocks = pool.take(50_000)
    for block in blocks:
        pool.cache(0, block, block.to_bytes(4, "big"))
    pool.release(blocks)
    pool.take(99_999)
    totals = pool.residency.totals
    assert totals.blocks_evicted == 50_000
    assert 400 < totals.evictions_timed < 600


def test_only_what_is_in_the_queue_can_be_taken_from_it():
    queue = FreeBlockQueue(3)
    with pytest.raises(InternalError):
        queue.pop_front(4)
    assert queue.num_free == 3
    (block,) = queue.pop_front(1)
    assert block not in queue
    with pytest.raises(InternalError):
        queue.remove(block)
    queue.check_integrity()


class QueueMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 12))
    def begin(self, size: int) -> None:
        self.queue = FreeBlockQueue(size)
        self.model = list(range(size))
        self.out: list[int] = []

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.model)))
        popped = self.queue.pop_front(count)
        assert popped == self.model[:count]
        del self.model[:count]
        self.out += popped

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(self.out), unique=True))
        self.queue.append(back)
        self.model += back
        self.out = [block for block in self.out if block not in back]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.model))
        self.queue.remove(block)
        self.model.remove(block)
        self.out.append(block)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert list(self.queue) == self.model
            assert self.queue.num_free == len(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
