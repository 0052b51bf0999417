"""Several groups: a hit is the longest prefix on which all of them agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.manager import (
    HybridCoordinator,
    NoCacheCoordinator,
    UnitaryCoordinator,
    hash_block_size,
    make_coordinator,
)
from tandem.engine.cache.pool import BlockPool
from tests.engine.cache.tables import FULL, admit, check, manager, request, sliding


def kind(*groups: KVCacheGroup, caching: bool = True) -> type:
    return type(make_coordinator(groups, BlockPool(9, len(groups), caching=caching)))


def test_there_is_one_coordinator_for_each_need():
    assert kind(FULL, caching=False) is NoCacheCoordinator
    assert kind(FULL, sliding(4), caching=False) is NoCacheCoordinator
    assert kind(FULL) is UnitaryCoordinator
    assert kind(sliding(4)) is UnitaryCoordinator
    assert kind(FULL, sliding(4)) is HybridCoordinator


def test_a_full_prefix_is_found_from_the_left_to_the_first_miss():
    cache = manager()
    a = request("a", range(16))
    admit(cache, a)
    cache.pool.uncache(cache.block_ids("a")[0][2])
    assert cache.find_prefix(request("b", range(16))) == ([[1, 2]], 8)


def test_groups_share_one_pool_and_have_their_own_blocks():
    cache = manager(FULL, sliding(6))
    a = request("a", range(10))
    admit(cache, a)
    assert cache.block_ids("a") == [[1, 2, 3], [4, 5, 6]]
    check(cache, a)
    cache.free(a)
    check(cache)


def test_a_prefix_is_as_long_as_all_groups_have_it():
    cache = manager(FULL, sliding(6))
    a = request("a", range(17))
    admit(cache, a)
    full, window = cache.block_ids("a")
    cache.pool.uncache(full[3])
    # The full group has three blocks; the window needs the two before their end, which it has.
    assert cache.find_prefix(request("b", range(17))) == ([full[:3], [0, *window[1:3]]], 12)


def test_a_shorter_answer_goes_round_until_all_agree():
    cache = manager(FULL, sliding(6), sliding(10))
    a = request("a", range(25))
    admit(cache, a)
    full, narrow, wide = cache.block_ids("a")
    # The narrow window misses block 5, so its run ends at 5 blocks; for that length the wide one needs 2, 3, 4
    # and misses 4, so it has 1, 2, 3; and the narrow one has 2 and 3 of these.
    cache.pool.uncache(narrow[5])
    cache.pool.uncache(wide[4])
    hits, num_hit = cache.find_prefix(request("b", range(25)))
    assert num_hit == 16
    assert hits == [full[:4], [0, 0, *narrow[2:4]], [0, *wide[1:4]]]
    b = request("b", range(25))
    assert admit(cache, b) == 16
    check(cache, a, b)


def test_nobody_agrees_on_nothing():
    cache = manager(FULL, sliding(6))
    a = request("a", range(9))
    admit(cache, a)
    for block in cache.block_ids("a")[1]:
        cache.pool.uncache(block)
    assert cache.find_prefix(request("b", range(9))) == ([[], []], 0)


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


@given(
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=10),
    length=st.integers(1, 25),
)
def test_what_is_found_is_the_longest_that_every_group_could_use(missing, length):
    """Against the definition: each length in turn, asked of each group on its own."""
    windows = [None, 6, 10]
    cache = manager(FULL, sliding(6), sliding(10))
    a = request("a", range(25))
    admit(cache, a)
    tables = cache.block_ids("a")
    for group, i in missing:
        cache.pool.uncache(tables[group][i])

    def usable(num_blocks: int) -> bool:
        for table, window in zip(tables, windows, strict=True):
            first = 0 if window is None else max(num_blocks * 4 - window + 1, 0) // 4
            if any(block not in cache.pool.hashes for block in table[first:num_blocks]):
                return False
        return True

    longest = max(n for n in range((length - 1) // 4 + 1) if usable(n))
    _, num_hit = cache.find_prefix(request("b", range(length)))
    assert num_hit == longest * 4
