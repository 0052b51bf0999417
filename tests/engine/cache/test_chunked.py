"""Chunked attention: a token reads its own chunk and nothing before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tests.engine.cache.tables import BLOCK, FULL, admit, check, decode, manager, request


def chunked(length: int, block_size: int = BLOCK) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.CHUNKED, block_size, (1,), length)


def table(cache, name):
    return cache.block_ids(name)[0]


def test_blocks_before_the_chunk_become_null_and_free():
    cache = manager(chunked(8))
    a = request("a", range(7))
    admit(cache, a)
    decode(cache, a, 7)
    assert table(cache, "a") == [1, 2]
    decode(cache, a, 8)  # it begins a chunk
    assert table(cache, "a") == [0, 0, 3]
    check(cache, a)
    cache.free(a)
    check(cache)


def test_a_block_that_two_chunks_share_is_kept_for_the_second():
    cache = manager(chunked(6))
    a = request("a", range(6))
    admit(cache, a)
    decode(cache, a, 6)  # it reads itself alone, in the second block
    assert table(cache, "a") == [0, 2]
    check(cache, a)


@given(length=st.integers(2, 20), prompt=st.integers(1, 40), output=st.integers(0, 40), gaps=st.sets(st.integers(0, 9)))
def test_what_the_next_token_reads_is_there(length: int, prompt: int, output: int, gaps: set[int]):
    group = chunked(length)
    cache = manager(FULL, group)
    a = request("a", range(prompt))
    admit(cache, a)
    for token in range(output):
        before, computed = cache.block_ids("a"), a.num_computed_tokens
        a.append_output_token(token)
        quiet = computed + 1 <= a.allocation_horizon
        assert cache.extend_slots(a, 1) is not None
        assert not (quiet and before != cache.block_ids("a"))
        first = group.first_read(computed)
        assert all(cache.block_ids("a")[1][first // BLOCK :])
        a.num_computed_tokens += 1
    check(cache, a)
    for block in (cache.block_ids("a")[1][i] for i in gaps if i < len(cache.block_ids("a")[1])):
        if block:
            cache.pool.uncache(block)
    b = request("b", [*range(prompt), *range(output), 999])
    hits, num_hit = cache.find_prefix(b)
    assert num_hit % BLOCK == 0
    assert all(hits[1][group.first_read(num_hit) // BLOCK :])
    admit(cache, b)
    check(cache, a, b)
