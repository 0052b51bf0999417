"""Every rank has the KV heads that its queries read, and every head is on some rank."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model.shard import fits, heads_of_rank

FITTING = [
    (kv_heads, per_head, size)
    for kv_heads, per_head, size in itertools.product(range(1, 65), range(1, 17), range(1, 17))
    if fits(kv_heads * per_head, kv_heads, size)
]


@given(st.sampled_from(FITTING))
def test_a_query_finds_its_head_on_its_rank(shape: tuple[int, int, int]) -> None:
    kv_heads, per_head, size = shape
    queries = kv_heads * per_head
    kept = [heads_of_rank(kv_heads, rank, size) for rank in range(size)]
    assert {head for one in kept for head in one} == set(range(kv_heads))
    assert len({len(one) for one in kept}) == 1
    each = queries // size
    for rank, heads in enumerate(kept):
        asked = {query // per_head for query in range(rank * each, (rank + 1) * each)}
        assert asked == set(heads)
