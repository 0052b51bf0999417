"""Slots for tokens: all or nothing, cached when certain, given back tail first; groups of layers agree on a hit, and followers of the
events know which blocks are cached."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.manager import KVCacheManager, hash_block_size
from tandem.engine.cache.pool import CacheEvents
from tandem.engine.request import Request
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engine.cache.tables import BLOCK, FULL, HASHER, admit, check, decode, manager, request, sliding


def table(cache, name):
    return cache.block_ids(name)[0]


def test_beyond_the_horizon_and_only_there_is_something_to_do():
    cache = manager()
    a = request("a", range(6))
    admit(cache, a)
    for token in range(20):
        a.append_output_token(token)
        before = cache.pool.num_free, cache.pool.num_cached
        end = a.num_computed_tokens + 1
        quiet = end <= a.allocation_horizon
        blocks = cache.extend_slots(a, 1)
        a.num_computed_tokens = end
        changed = before != (cache.pool.num_free, cache.pool.num_cached)
        assert changed != quiet
        assert blocks is not None
        assert any(blocks) == (before[0] != cache.pool.num_free)
    check(cache, a)


def test_a_hit_is_not_taken_for_itself():
    """Blocks that were found leave the free queue too: they can't be counted on for what is new."""
    cache = manager(num_blocks=5)
    other, a = request("other", [50]), request("a", range(12))
    admit(cache, other)
    admit(cache, a)
    cache.free(a)
    b = request("b", [*range(9), 99, 99, 99, 99])  # two found, two needed, and three free with the two
    assert admit(cache, b) is None
    assert cache.pool.num_cached == 3
    check(cache, other)


def test_a_copy_of_a_cached_block_stays_where_it_is():
    """The seeds' example: the same request again, which fills a block that another holds already."""
    cache = manager()
    a, b = request("a", range(6)), request("b", range(6))
    admit(cache, a)
    decode(cache, a, 6, 7, 8)
    admit(cache, b)
    decode(cache, b, 6, 7, 8)
    assert table(cache, "a") == [1, 2, 3]
    assert table(cache, "b") == [1, 4, 5]
    assert cache.pool.num_cached == 3
    assert cache.pool.hashes[2] == cache.pool.hashes[4]
    check(cache, a, b)
    cache.free(b)
    c = request("c", [*range(8), 50])
    assert admit(cache, c) == 8
    assert table(cache, "c")[:2] == [1, 2]
    check(cache, a, c)


def test_without_caching_there_is_nothing_to_find():
    cache = manager(caching=False)
    a, b = request("a", range(10)), request("b", range(10))
    admit(cache, a)
    assert admit(cache, b) == 0
    assert cache.pool.num_cached == 0
    assert a.allocation_horizon == 12
    decode(cache, a, 1, 2, 3, 4, 5)
    check(cache, a, b)


def test_lookahead_reserves_up_to_the_context_and_does_not_cache():
    cache = manager(num_lookahead_tokens=3)
    a = request("a", range(8))
    admit(cache, a)
    assert (len(table(cache, "a")), cache.pool.num_cached) == (3, 2)
    decode(cache, a, 8)
    assert len(table(cache, "a")) == 3
    decode(cache, a, 9)
    assert len(table(cache, "a")) == 4
    check(cache, a)
    short = manager(max_model_len=9, num_lookahead_tokens=20)
    admit(short, request("b", range(8)))
    assert len(table(short, "b")) == 3


def test_what_comes_later_has_slots_and_is_not_cached_before_it_is_there():
    cache = manager()
    a, b = request("a", range(12)), request("b", range(12))
    assert cache.allocate_slots(a, 0, hits=[[]], num_external_tokens=12, delay_caching=True) is not None
    assert (len(table(cache, "a")), cache.pool.num_cached) == (3, 0)
    assert admit(cache, b) == 0
    a.num_computed_tokens = 12
    cache.cache_loaded(a)
    assert cache.pool.num_cached == 6  # three of each: copies stay
    check(cache, a, b)


def test_a_rewind_keeps_blocks_and_forgets_what_was_wrong():
    cache = manager()
    a = request("a", range(12))
    admit(cache, a)
    cache.rewind(a, 6)
    assert (a.num_computed_tokens, len(table(cache, "a")), cache.pool.num_cached) == (6, 3, 1)
    check(cache, a)
    assert cache.extend_slots(a, 6) == [[]]
    a.num_computed_tokens = 12
    assert cache.pool.num_cached == 3
    check(cache, a)


def test_blocks_ahead_of_a_request():
    cache = manager()
    a, b = request("a", range(12)), request("b", range(12))
    a.limit(20, frozenset())
    b.limit(20, frozenset())
    assert cache.num_blocks_ahead(a, [[]]) == 5
    admit(cache, a, num_new=5)
    assert cache.num_blocks_ahead(a) == 3
    a.num_computed_tokens = 0
    cache.free(a)
    a.num_computed_tokens = 0
    admit(cache, a)
    hits, _ = cache.find_prefix(b)
    assert cache.num_blocks_ahead(b, hits) == 3  # the two it would share are in use anyway
    cache.free(a)
    assert cache.num_blocks_ahead(b, hits) == 5  # now they would be taken out of the free ones


@pytest.mark.parametrize(
    ("groups", "num_blocks", "expected"),
    [
        ((FULL,), 11, 10 * BLOCK),
        ((FULL, FULL), 11, 5 * BLOCK),
        ((FULL,), 1001, 1000),  # the context, not the pool
        ((sliding(8),), 40, 1000),  # a window never needs more than it and a step
        ((FULL, sliding(8)), 40, 20 * BLOCK),  # 20 blocks, and 19 for the window and a step
    ],
)
def test_the_longest_request_that_the_pool_can_hold(groups, num_blocks, expected):
    assert manager(*groups, num_blocks=num_blocks).max_request_tokens == expected


def test_the_worked_example_step_by_step():
    cache = manager(num_blocks=11)
    pool = cache.pool

    def table(name: str) -> list[int]:
        return [block - 1 for block in cache.block_ids(name)[0]]

    def free() -> list[int]:
        return [block - 1 for block in pool.free_queue]

    def cached() -> set[int]:
        return {block - 1 for block in pool.hashes}

    # 1. The cache is empty. Request 0 has 15 tokens: four blocks, three of them full and cached.
    first = request("0", range(15))
    assert admit(cache, first) == 0
    assert table("0") == [0, 1, 2, 3]
    assert cached() == {0, 1, 2}

    # 2. It fills its fourth block, which is cached, and asks for a fifth.
    decode(cache, first, 15)
    assert cached() == {0, 1, 2, 3}
    decode(cache, first, 16)
    assert table("0") == [0, 1, 2, 3, 4]

    # 3. Request 1 has 14 tokens, of which ten are request 0's: two whole blocks are found, half a block is not.
    second = request("1", [*range(10), 110, 111, 112, 113])
    assert admit(cache, second) == 8
    assert table("1") == [0, 1, 5, 6]
    assert cached() == {0, 1, 2, 3, 5}
    assert free() == [7, 8, 9]

    # 4. Request 0 ends. Its own blocks are free, the last first; those it shares are not. What was cached stays.
    cache.free(first)
    assert free() == [7, 8, 9, 4, 3, 2]
    assert cached() == {0, 1, 2, 3, 5}
    check(cache, second)

    # 5. Request 1 ends.
    cache.free(second)
    assert free() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    assert cached() == {0, 1, 2, 3, 5}

    # 6. Request 2 has 29 tokens, of which twelve are request 0's. The blocks that are found leave the queue before
    #    the rest are taken from its head, and block 3 is evicted on the way.
    third = request("2", [*range(12), *range(200, 217)])
    hits, num_hit = cache.find_prefix(third)
    assert ([block - 1 for block in hits[0]], num_hit) == ([0, 1, 2], 12)
    assert admit(cache, third) == 12
    assert table("2") == [0, 1, 2, 7, 8, 9, 4, 3]
    assert free() == [6, 5]
    assert cached() == {0, 1, 2, 7, 8, 9, 4, 5}
    evicted = first.block_hashes[3]
    assert pool.lookup(0, evicted) is None
    assert HASHER.block_size == 4
    check(cache, third)


def test_blocks_of_several_sizes_agree_on_lengths_that_all_can_have():
    wide = KVCacheGroup(AttentionKind.FULL, 8, (0,))
    assert hash_block_size([wide, sliding(6)]) == 4
    cache = manager(wide, sliding(6))
    a = request("a", range(21))
    admit(cache, a)
    assert [len(table) for table in cache.block_ids("a")] == [3, 6]
    _, num_hit = cache.find_prefix(request("b", range(21)))
    assert num_hit == 16
    _, num_hit = cache.find_prefix(request("b", range(15)))
    assert num_hit == 8
    b = request("b", [*range(16), 99, 98])
    assert admit(cache, b) == 16
    check(cache, a, b)


def test_allocation_is_all_or_nothing_over_all_groups():
    cache = manager(FULL, sliding(30), num_blocks=10)
    other = request("other", [50])
    admit(cache, other)
    assert admit(cache, request("a", range(16))) is None  # four blocks in each group, and seven are left
    check(cache, other)
    b = request("b", range(12))
    assert admit(cache, b) == 0
    b.append_output_token(1)
    assert cache.extend_slots(b, 1) is None  # one in each group, and one is left
    assert cache.block_ids("b") == [[3, 4, 5], [6, 7, 8]]
    check(cache, other, b)


CHUNKS = KVCacheGroup(AttentionKind.CHUNKED, 4, (1,), 16)
KINDS = [
    (FULL,), (sliding(6),), (sliding(20),), (CHUNKS,), (FULL, CHUNKS), (FULL, sliding(6)),
    (FULL, sliding(6), sliding(10))
]  # fmt: skip


@given(
    groups=st.sampled_from(KINDS),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=10),
    length=st.integers(1, 25),
)
def test_what_is_found_is_the_longest_that_every_group_could_use(groups, missing, length):
    """Against the definition: each length in turn, asked of each group on its own. Each gets its own blocks from the first that is read
    on, and the null block before."""
    cache = manager(*groups)
    a = request("a", range(25))
    cache.allocate_slots(a, 24, hits=[[] for _ in groups])
    a.num_computed_tokens = 24
    tables = cache.block_ids("a")
    for group, i in missing:
        if group < len(groups):
            cache.pool.uncache(tables[group][i])

    def first_read(group: KVCacheGroup, num_blocks: int) -> int:
        return max(int(group.first_read(num_blocks * 4)), 0) // 4

    def usable(num_blocks: int) -> bool:
        return all(
            block in cache.pool.hashes
            for group, table in zip(groups, tables, strict=True)
            for block in table[first_read(group, num_blocks) : num_blocks]
        )

    longest = max(n for n in range((length - 1) // 4 + 1) if usable(n))
    b = request("b", range(length))
    hits, num_hit = cache.find_prefix(b)
    assert num_hit == longest * 4
    for group, table, found in zip(groups, tables, hits, strict=True):
        first = first_read(group, longest)
        assert found == [0] * first + table[first:longest]
    assert admit(cache, b) == num_hit
    check(cache, a, b)


class Follower:
    """Holds what the events say, and each block's tokens by its hash."""

    def __init__(self, groups: int) -> None:
        self.cached: list[set[bytes]] = [set() for _ in range(groups)]

    def follow(self, cache: KVCacheManager) -> None:
        assert cache.pool.events is not None
        for event in cache.pool.events.take():
            match event:
                case BlockStored():
                    there = self.cached[event.group_idx or 0]
                    assert there.isdisjoint(event.block_hashes)
                    there.update(event.block_hashes)
                    self._check_hashes(event)
                case BlockRemoved():
                    there = self.cached[event.group_idx or 0]
                    assert there.issuperset(event.block_hashes)
                    there.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    for there in self.cached:
                        there.clear()
        assert self.cached == [set(each) for each in cache.pool.cached]

    def _check_hashes(self, event: BlockStored) -> None:
        """From the parent and the tokens the hashes follow, where nothing else is in them."""
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        if event.extra_keys is None:
            parent = event.parent_block_hash or HASHER.root
            assert HASHER.hash_blocks(parent, event.token_ids, None) == event.block_hashes


def followed(*groups: KVCacheGroup, num_blocks: int) -> tuple[KVCacheManager, Follower]:
    cache = manager(*groups, num_blocks=num_blocks)
    cache.pool.events = CacheEvents(len(groups))
    return cache, Follower(len(groups))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(FULL,), (FULL, sliding(8))]))
def test_the_events_tell_what_is_cached(seed: int, groups: tuple[KVCacheGroup, ...]) -> None:
    rng = random.Random(seed)
    cache, follower = followed(*groups, num_blocks=24)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    running: list[Request] = []
    for number in range(30):
        if rng.random() < 0.5:
            each = request(f"r{number}", [*rng.choice(prompts), *range(rng.randint(0, 6))])
            if admit(cache, each) is not None:
                running.append(each)
        elif running:
            each = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.3:
                cache.coordinator.forget_after(each.request_id, 0)
            cache.free(each)
        elif rng.random() < 0.3:
            cache.reset_prefix_cache()
        follower.follow(cache)


def test_one_event_for_the_blocks_of_a_chunk_with_what_made_their_hashes() -> None:
    cache, _ = followed(FULL, num_blocks=50)
    assert cache.pool.events is not None
    each = request("a", range(10), cache_salt="s")
    admit(cache, each)
    (stored,) = cache.pool.events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == each.block_hashes[:2]
    assert (stored.parent_block_hash, stored.token_ids) == (None, list(range(8)))
    assert (stored.block_size, stored.medium, stored.extra_keys) == (BLOCK, "GPU", [("salt:s",), None])
    decode(cache, each, 10, 11, 12)
    (stored,) = cache.pool.events.take()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == each.block_hashes[1]
