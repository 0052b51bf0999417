"""Sliding windows and chunked attention: blocks that no later token reads are freed, and a hit needs only the blocks that will be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tests.engine.cache.tables import BLOCK, FULL, admit, check, decode, manager, request, sliding


def table(cache, name):
    return cache.block_ids(name)[0]


def test_a_group_needs_a_window():
    with pytest.raises(ConfigurationError, match="window"):
        manager(KVCacheGroup(AttentionKind.SLIDING, BLOCK, (0,)))


def test_blocks_behind_the_window_become_null_and_free():
    cache = manager(sliding(6))
    a = request("a", range(10))
    admit(cache, a)
    assert table(cache, "a") == [1, 2, 3]
    decode(cache, a, 10)  # token 10 reads tokens 5 to 10: the first block is before it
    assert table(cache, "a") == [0, 2, 3]
    assert 1 in cache.pool.free_queue
    check(cache, a)
    decode(cache, a, 11, 12)
    assert table(cache, "a") == [0, 2, 3, 4]
    decode(cache, a, 13)  # reads 8 to 13
    assert table(cache, "a") == [0, 0, 3, 4]
    check(cache, a)
    cache.free(a)
    check(cache)


def test_what_a_window_skips_of_a_load_needs_no_blocks():
    cache = manager(sliding(6), num_blocks=8)
    a = request("a", range(20))
    assert cache.allocate_slots(a, 0, hits=[[]], num_external_tokens=20, delay_caching=True) is not None
    assert table(cache, "a") == [0, 0, 0, 1, 2]
    a.num_computed_tokens = 20
    cache.cache_loaded(a)
    assert cache.pool.num_cached == 2
    check(cache, a)


def test_a_request_can_only_go_back_to_where_its_window_still_is():
    cache = manager(sliding(6))
    a = request("a", range(18))
    admit(cache, a)
    decode(cache, a, 18)
    assert table(cache, "a")[:4] == [0, 0, 0, 4]
    cache.rewind(a, 17)
    assert a.num_computed_tokens == 17
    check(cache, a)
    cache.rewind(a, 8)
    assert a.num_computed_tokens == 0
    check(cache)


@given(
    window=st.integers(1, 20),
    prompt=st.integers(1, 60),
    steps=st.lists(st.integers(1, 9), max_size=12),
    step=st.integers(1, 16),
)
def test_a_request_never_holds_more_than_it_was_said_to(window, prompt, steps, step):
    cache = manager(sliding(window), max_new_tokens=step, num_blocks=200)
    a = request("a", range(prompt))
    admit(cache, a, num_new=step)
    group = cache.coordinator.managers[0]
    for count in [step] * 8 + steps:
        while a.num_tokens < a.num_computed_tokens + min(count, step):
            a.append_output_token(a.num_tokens)
        cache.extend_slots(a, min(count, step))
        held = sum(block != 0 for block in table(cache, "a"))
        assert held <= group.max_blocks(a.num_computed_tokens + min(count, step), step)
        a.num_computed_tokens += min(count, step)
        check(cache, a)


def chunked(length: int, block_size: int = BLOCK) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.CHUNKED, block_size, (1,), length)


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


@given(
    group=st.builds(lambda kind, length: kind(length), st.sampled_from([chunked, sliding]), st.integers(2, 20)),
    prompt=st.integers(1, 40),
    output=st.integers(0, 40),
    gaps=st.sets(st.integers(0, 9)),
)
def test_what_the_next_token_reads_is_there(group: KVCacheGroup, prompt: int, output: int, gaps: set[int]):
    """Up to the horizon no block is given up, or taken."""
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
