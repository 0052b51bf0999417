"""RMSNorm, and rotary embedding with the write to the cache, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import probes

Unit = tuple[torch.dtype, str]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("size", [4, 30, 36, 64, 100, 576])
def test_norm(unit: Unit, size: int) -> None:
    x, weight = torch.randn(19, size) * 3, torch.randn(size)
    expected = rms_norm(x.double(), weight.double(), 1e-5).float()
    tolerance = 8e-3 if unit[1] in probes.ROUNDING else 1e-5
    torch.testing.assert_close(probes.norm(*unit, x, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim], as transformers does it."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 4), (10, 16), (32, 1), (64, 16), (96, 32), (256, 8)])
def test_rotary_and_cache_write(unit: Unit, head_dim: int, block_size: int, normed: bool) -> None:
    dtype, name = unit
    tokens, heads, kv_heads, blocks = 21, 6, 2, 48
    half = head_dim // 2
    table = torch.randn(64, head_dim)
    positions = torch.randint(0, 64, (tokens,))
    slots = torch.randperm(blocks * block_size)[:tokens]
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if normed else None
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    cache = torch.full((blocks, 3, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)

    actual = probes.rotary(name, cache, heads, qkv, table, positions, slots, norms)

    q, k, v = (
        part.view(tokens, -1, head_dim).double()
        for part in qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    )
    if norms:
        q, k = rms_norm(q, norms[0].double(), 1e-5), rms_norm(k, norms[1].double(), 1e-5)
    cos, sin = table[positions, :half].double(), table[positions, half:].double()
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(
        actual[:, : heads * head_dim].view(tokens, heads, head_dim), q.float(), rtol=1e-5, atol=1e-5
    )
    block, offset = slots // block_size, slots % block_size
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    for which, expected in enumerate((k, v)):
        written = cache[block, 0, which, :, offset].double()
        torch.testing.assert_close(written, expected, rtol=tolerance, atol=tolerance)
    assert cache.isnan().sum() == cache.numel() - 2 * tokens * kv_heads * head_dim, "wrote where it should not"
