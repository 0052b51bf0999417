"""Every rank has the KV heads that its queries read, and every head is on some rank."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.engine.model.shard import fits, heads_of_rank


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_a_query_finds_its_head_on_its_rank(kv_heads: int, per_head: int, size: int) -> None:
    queries = kv_heads * per_head
    assume(fits(queries, kv_heads, size))
    kept = [heads_of_rank(kv_heads, rank, size) for rank in range(size)]
    assert {head for one in kept for head in one} == set(range(kv_heads))
    assert len({len(one) for one in kept}) == 1
    each = queries // size
    for rank, heads in enumerate(kept):
        asked = {query // per_head for query in range(rank * each, (rank + 1) * each)}
        assert asked == set(heads)
