"""The Triton kernels, compared with their formulas in Triton's own interpreter, which needs no GPU and runs the same lines.
`make test-gpu-packages` installs Triton; without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

_INSTALLED = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not _INSTALLED, reason="triton is not installed"),
    pytest.mark.slow,  # the interpreter goes element by element
]

# Triton decides once whether it interprets, when it is imported: so in a process of its own.
_CODE = """
import torch
from tandem.engine.model.fused import triton_ops as ops
from tandem.engine.model.fused.pieces import Activation
torch.manual_seed(0)
wide = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

def same(ours, theirs, what):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-9)
    assert error <= wide[theirs.dtype], (what, float(error))

def rounded_alike(ours, theirs):
    # Before it is rounded a value may differ in its last bit. And where a value is rounded up to a power of two, Triton's
    # interpreter loses the carry; a card has an instruction for it.
    off = (ours - theirs).abs() > 0.13 * theirs.abs() + 2e-3
    assert (theirs[off].abs().log2() % 1 == 0).all()
    assert (ours[off] * 2 == theirs[off]).all()
    assert (ours != theirs).float().mean() < 0.1

for dtype in wide:
    whole = torch.randn(1, 5, 3 * 4 * 24).to(dtype)
    heads = whole[..., : 4 * 24].view(1, 5, 4, 24)  # a part of a merged product: rows at two strides
    for x in (torch.randn(7, 40).to(dtype), torch.randn(1, 6, 33).to(dtype), heads, heads[0, 0], heads.transpose(1, 2)):
        weight = torch.randn(x.shape[-1]).to(dtype)
        for offset in (0.0, 1.0):
            same(ops._launch_norm(x, weight, offset, 1e-5), ops._plain_norm(x, weight, offset, 1e-5), "norm")
    for x in (torch.randn(1, 5, 2 * 48).to(dtype), torch.randn(3, 2 * 1500).to(dtype), whole[:, :, :64]):
        for activation in Activation:
            same(ops._launch_gated(x, activation.value), ops._plain_gated(x, activation.value), "gated")
    for x in (torch.randn(5, 48).to(dtype), torch.zeros(2, 40).to(dtype), whole[0, :, 7:50]):
        (ours, scale), (theirs, right) = ops._launch_quantize_rows(x), ops._plain_quantize_rows(x)
        same(scale, right, "scales")
        assert ours.dtype == theirs.dtype
        rounded_alike(ours.float(), theirs.float())
    T, H, K, D, size = 6, 4, 2, 16, 4
    for turns in (False, True):
        for pads in (False, True):
            norms = (torch.randn(D).to(dtype), torch.randn(D).to(dtype)) if turns and pads else (None, None)
            merged = torch.randn(T, (H + 2 * K) * D).to(dtype)
            q, k, v = merged.split((H * D, K * D, K * D), dim=1)
            q, k, v = (part.view(T, -1, D).transpose(0, 1) for part in (q, k, v))
            angle = torch.rand(T, D // 2)
            angles = [torch.cat((f(angle), f(angle)), dim=1).to(dtype) for f in (torch.cos, torch.sin)]
            slots = torch.tensor([4, 5, 21, 2, 13, 0]) if pads else torch.tensor([4, 5, 21, 22, 13, 9])
            found = []
            for work in (ops._launch_rotate_and_write, ops._plain_rotate_and_write):
                cache = torch.full((6, 3, 2, K + 1, size, D + 8), 9.0, dtype=dtype)
                layer = cache[:, 1]
                views = layer[:, 0, :K, :, :D], layer[:, 1, :K, :, :D]
                out = work(q, k, v, *(angles if turns else (None, None)), *norms, 1.0, 1e-6, slots, *views, pads)
                found.append((out, cache))
            same(found[0][0], found[1][0], "queries")
            if dtype is torch.bfloat16:  # kept in fewer bits, and too large a value is the largest
                v = v * 400
                kept = []
                for work in (ops._launch_rotate_and_write, ops._plain_rotate_and_write):
                    cache = torch.zeros(6, 2, K, size, D).to(torch.float8_e4m3fn)
                    work(q, k, v, *(angles if turns else (None, None)), *norms, 1.0, 1e-6, slots, cache[:, 0], cache[:, 1], pads)
                    kept.append(cache.float())
                assert kept[0].abs().max() == 448
                rounded_alike(*kept)
            same(found[0][1], found[1][1], "cache")
            assert found[0][0].is_contiguous()
print("agree")
"""


def test_kernels_compute_their_formulas() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "agree\n"
