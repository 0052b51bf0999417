"""Several groups: a hit is the longest prefix on which all of them agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.manager import hash_block_size
from tests.engine.cache.tables import FULL, admit, check, manager, request, sliding


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
