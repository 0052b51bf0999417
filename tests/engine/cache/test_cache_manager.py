"""Slots for tokens: all or nothing, cached when certain, given back tail first."""

from __future__ import annotations

import pytest

from tests.engine.cache.tables import BLOCK, FULL, admit, check, decode, manager, request, sliding


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


def test_lookahead_reserves_and_does_not_cache():
    cache = manager(num_lookahead_tokens=3)
    a = request("a", range(8))
    admit(cache, a)
    assert len(table(cache, "a")) == 3
    assert cache.pool.num_cached == 2
    decode(cache, a, 8)
    assert len(table(cache, "a")) == 3
    decode(cache, a, 9)
    assert len(table(cache, "a")) == 4
    check(cache, a)


def test_nobody_gets_slots_beyond_the_context():
    cache = manager(max_model_len=9, num_lookahead_tokens=20)
    a = request("a", range(8))
    admit(cache, a)
    assert len(table(cache, "a")) == 3


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
