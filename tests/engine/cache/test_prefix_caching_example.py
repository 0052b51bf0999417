"""The worked example of the prefix cache: ten blocks of four tokens, three requests, six moments.

Its blocks are numbered from 0; here block 0 is the null block, so every number is one higher.
"""

from __future__ import annotations

from tests.engine.cache.tables import HASHER, admit, check, decode, manager, request


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
