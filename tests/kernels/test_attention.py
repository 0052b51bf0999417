"""Paged attention of every unit against torch, over block tables in random order.

Whatever a request may not read is NaN: the rest of its last block, other blocks, what slid out of its window.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import probes
from tests.kernels.probes import Requests

Unit = tuple[torch.dtype, str]


class PagedKeys:
    """K and V of some requests, and the cache that holds them."""

    def __init__(
        self,
        unit: Unit,
        queries: list[int],
        contexts: list[int],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        window: int = 0,
        seed: int = 0,
    ) -> None:
        self.unit, self.window = unit, window
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-context // block_size) for context in contexts]
        total = sum(counts) + 1
        order = torch.randperm(total - 1, generator=generator) + 1
        self.cache = torch.full((total, 2, 2, kv_heads, block_size, head_dim), float("nan"), dtype=unit[0])
        tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        self.keys, self.values = [], []
        for index, (count, context, query) in enumerate(zip(counts, contexts, queries, strict=True)):
            blocks, order = order[:count], order[count:]
            tables[index, :count] = blocks
            k, v = torch.randn(2, context, kv_heads, head_dim, generator=generator).to(unit[0])
            self.keys.append(k)
            self.values.append(v)
            first = max(0, context - query - window + 1) if window else 0
            at = torch.arange(first, context)
            for part, states in enumerate((k, v)):
                self.cache[blocks[at // block_size], 0, part, :, at % block_size] = states[first:]
            tables[index, : first // block_size] = 0  # given back
        self.requests = Requests(queries, contexts, tables)
        self.q = torch.randn(sum(queries), heads, head_dim, generator=generator)

    def run(self, threads: int = 1) -> torch.Tensor:
        return probes.attention(self.unit[1], self.cache, self.requests, self.q, self.window, threads)

    def expected(self) -> torch.Tensor:
        q = self.q.to(torch.bfloat16) if self.unit[1] in probes.ROUNDING else self.q
        out = []
        for request, rows in enumerate(q.double().split(self.requests.queries)):
            k, v = self.keys[request].double(), self.values[request].double()
            group = rows.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", rows, k) * rows.shape[2] ** -0.5
            at = torch.arange(len(k) - len(rows), len(k))[:, None]
            key = torch.arange(len(k))[None, :]
            seen = key <= at
            if self.window:
                seen &= key > at - self.window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(out).float()

    def check(self, threads: int = 1) -> None:
        tolerance = 1.5e-2 if self.unit[1] in probes.ROUNDING else 1e-5
        torch.testing.assert_close(self.run(threads), self.expected(), rtol=tolerance, atol=tolerance)


HEADS = [(1, 1), (4, 4), (9, 3), (14, 2), (15, 1), (16, 1), (20, 1), (32, 2)]


@pytest.mark.parametrize(
    "shape",
    [
        *({"head_dim": size} for size in (8, 10, 32, 40, 64, 80, 96, 128, 192, 256)),
        *({"block_size": size} for size in (1, 2, 4, 8, 16, 32, 64, 512)),
        *({"heads": heads, "kv_heads": kv_heads, "head_dim": 32} for heads, kv_heads in HEADS),
        *({"window": window, "head_dim": 32} for window in (1, 5, 16, 100, 256, 257, 1000)),
    ],
    ids=str,
)
def test_shapes(unit: Unit, shape: dict[str, int]) -> None:
    PagedKeys(unit, [1, 40, 3, 300, 1], [700, 640, 31, 530, 7], **shape).check()


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 60), st.one_of(st.integers(0, 60), st.integers(200, 600))), min_size=1, max_size=5
    ),
    kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 3, 7]),
    window=st.sampled_from([0, 0, 33]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 5),
)
def test_mixed_batches(
    unit: Unit, lengths: list[tuple[int, int]], kv_heads: int, group: int, window: int, threads: int, seed: int
) -> None:
    PagedKeys(
        unit,
        [query for query, _ in lengths],
        [query + past for query, past in lengths],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=32,
        window=window,
        seed=seed,
    ).check(threads)


@pytest.mark.parametrize("window", [0, 70])
def test_chunks_and_neighbours_change_no_bit(unit: Unit, window: int) -> None:
    """A request whose prompt comes in chunks, ends as single tokens, and shares its steps with others."""
    context = 600
    whole = PagedKeys(unit, [context], [context], window=window, seed=3)
    expected = whole.run()
    computed = 0
    for size in (1, 2, 256, 3, 17, 200, 64, 5, 1, 50, 1):
        part = PagedKeys(unit, [1, 30], [50, 31], window=window, seed=4)
        mine, table = whole.requests.tables, part.requests.tables
        offset = part.cache.shape[0]
        tables = torch.zeros(3, mine.shape[1], dtype=torch.int32)
        tables[0, : table.shape[1]], tables[2, : table.shape[1]] = table[0], table[1]
        tables[1] = mine[0] + offset
        computed += size
        q = torch.cat((part.q[:1], whole.q[computed - size : computed], part.q[1:]))
        requests = Requests([1, size, 30], [50, computed, 31], tables)
        cache = torch.cat((part.cache, whole.cache))
        for threads in (1, 2):
            actual = probes.attention(unit[1], cache, requests, q, window, threads)
            assert torch.equal(actual[1 : 1 + size], expected[computed - size : computed])
    assert computed == context


def test_scores_far_apart_and_far_from_zero(unit: Unit) -> None:
    paged = PagedKeys(unit, [1, 40], [700, 300])
    paged.q *= 40
    # One key takes nearly all the weight, so bfloat16 scores that differ by rounding may weigh differently.
    actual, expected = paged.run(), paged.expected()
    assert actual.isfinite().all()
    if unit[1] not in probes.ROUNDING:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
