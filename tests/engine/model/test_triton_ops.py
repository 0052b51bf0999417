"""The Triton kernels, compared with their formulas in Triton's own interpreter, which needs no GPU and runs the same lines, and compiled
for GPUs that are not there: Triton brings the whole compiler. `make test-gpu-packages` installs Triton; without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_INSTALLED = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not _INSTALLED, reason="triton is not installed"),
    pytest.mark.slow,  # the interpreter goes element by element
]

# Triton decides once whether it interprets, when it is imported: so in a process of its own.
_CODE = """
import torch
from tandem.engine.model.cuda import triton_ops as ops
from tandem.engine.model.quantized import round_rows as rounds
from tandem.engine.model.sampling import row_sums as sums
from tandem.engine.model.pieces import Activation
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
    for x in (torch.randn(1, 6, 33).to(dtype), torch.randn(7, 40).to(dtype), whole[:, :, :40]):
        y, weight, totals, normed = torch.randn(x.shape).to(dtype), torch.randn(x.shape[-1]).to(dtype), [], []
        for work in (ops._launch_add_and_norm, ops._plain_add_and_norm):
            totals.append(torch.empty(x.shape, dtype=dtype))
            normed.append(work(x, y, totals[-1], weight, 1.0, 1e-5))
        same(*normed, "norm of a sum")
        same(*totals, "sum")
    for x in (torch.randn(1, 5, 2 * 48).to(dtype), torch.randn(3, 2 * 1500).to(dtype), whole[:, :, :64]):
        for activation in Activation:
            same(ops._launch_gated(x, activation.value), ops._plain_gated(x, activation.value), "gated")
    for x in (torch.randn(5, 48).to(dtype), torch.zeros(2, 40).to(dtype), whole[0, :, 7:50]):
        (ours, scale), (theirs, right) = rounds._launch_quantize_rows(x), rounds._plain_quantize_rows(x)
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
for dtype, most in ((torch.float32, 1e-4), (torch.float16, 0.05)):  # the interpreter multiplies no matrices of bfloat16
    x, weight = torch.randn(1, 150, 200).to(dtype), torch.randn(130, 200).to(dtype)
    for bias in (None, torch.randn(130).to(dtype)):
        found = ops._launch_product(x, weight, bias)
        assert (found.float() - ops._plain_product(x, weight, bias).float()).abs().max() <= most
        for first, end in ((0, 1), (63, 65), (64, 150), (149, 150), (0, 64)):
            # The same bits alone, among others, and elsewhere in a tile.
            assert torch.equal(ops._launch_product(x[:, first:end], weight, bias), found[:, first:end]), (first, end)
for shape in ((3, 5000), (4, 7, 64), (2, 1), (0, 9)):
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(shape, dtype=dtype)
        found = sums._launch_row_sums(x)
        torch.testing.assert_close(found, x.sum(dim=-1))
        assert torch.equal(sums._launch_row_sums(x[:1]), found[:1]), shape
print("agree")
"""


def test_kernels_compute_their_formulas() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "agree\n"


# Our own launchers, on a driver that launches nothing.
_COMPILES = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
capability, all_of_them = int(sys.argv[1]), sys.argv[2] == "all"

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0
    def get_current_target(self): return GPUTarget("cuda", capability, 32)
    def get_active_torch_device(self): return torch.device("cpu")
    class utils:
        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 101376, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

driver.set_active(Driver())
compiled = {}

def launcher(kernel, grid):
    def launch(*arguments, **options):
        made = kernel.run(*arguments, grid=grid, warmup=True, **options)
        compiled[made.hash] = (kernel.fn.__name__, len(made.asm["cubin"]), made.metadata)
    return launch

JITFunction.__getitem__ = launcher
from tandem.engine.model.cuda import triton_ops as ops
from tandem.engine.model.quantized import round_rows as rounds
from tandem.engine.model.sampling import row_sums as sums
bf16, f16, f32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
for dtype in (bf16, f16) if all_of_them else (bf16,):
    for rows, n in ((1, 4096), (3, 576), (2, 8192)):
        ops._launch_norm(torch.ones(1, rows, n, dtype=dtype), torch.ones(n, dtype=dtype), 0.0, 1e-5)
        x = torch.ones(1, rows, n, dtype=dtype)
        ops._launch_add_and_norm(x, x, x, torch.ones(n, dtype=dtype), 0.0, 1e-5)
    heads = torch.ones(7, 6144, dtype=dtype)[:, :4096].view(1, 7, 32, 128)
    for x in (heads, heads.transpose(1, 2)):
        ops._launch_norm(x, torch.ones(128, dtype=dtype), 1.0, 1e-6)
    for activation in ("silu", "gelu_tanh"):
        ops._launch_gated(torch.ones(1, 1, 2 * 14336, dtype=dtype), activation)
        ops._launch_gated(torch.ones(1, 5, 2 * 1536, dtype=dtype), activation)
    if capability >= 89:
        for n in (4096, 14336):
            rounds._launch_quantize_rows(torch.ones(5, n, dtype=dtype))
# What sums a row has one code, however many rows there are: another code may sum it in another order.
for rows in (1, 2, 7, 16, 64, 65, 2048):
    x, weight = torch.ones(1, rows, 4096, dtype=bf16), torch.ones(4096, dtype=bf16)
    heads, matrix = torch.ones(1, rows, 6144, dtype=bf16)[..., :4096], torch.ones(64, 4096, dtype=bf16)
    before = set(compiled)
    ops._launch_product(x, matrix, None)
    ops._launch_product(x, matrix, weight[:64])
    ops._launch_norm(x, weight, 0.0, 1e-5)
    ops._launch_add_and_norm(x, x, x, weight, 0.0, 1e-5)
    ops._launch_norm(heads.view(1, rows, 32, 128), weight[:128], 0.0, 1e-5)
    ops._launch_norm(heads.view(1, rows, 32, 128).transpose(1, 2), weight[:128], 0.0, 1e-5)
    q = heads.view(1, rows, 32, 128).transpose(1, 2)[0]
    cache = torch.zeros(3, 2, 8, 16, 128, dtype=bf16)
    for probabilities in (torch.ones(rows, 128256), torch.ones(rows, 501, 256), torch.ones(rows, 2004).double()):
        sums._launch_row_sums(probabilities)
    ops._launch_rotate_and_write(
        q, q[:8], q[:8], *(torch.ones(rows, 128, dtype=bf16),) * 2, weight[:128], weight[:128], 0.0, 1e-6,
        torch.arange(rows) + 16, cache[:, 0], cache[:, 1], False,
    )
    assert rows == 1 or set(compiled) == before, [compiled[each][0] for each in set(compiled) - before]
kinds = [(bf16, bf16), (f16, f16)] + ([(bf16, fp8)] if capability >= 89 else [])
for dtype, kept in kinds if all_of_them else kinds[:1]:
    for dim, q_heads, heads in ((128, 32, 8), (64, 9, 3), (256, 8, 4), (96, 32, 32)) if all_of_them else ((128, 32, 8),):
        for tokens in (1, 7):
            merged = torch.ones(1, tokens, (q_heads + 2 * heads) * dim, dtype=dtype)
            parts = merged.split([q_heads * dim, heads * dim, heads * dim], -1)
            q, k, v = (part.view(1, tokens, -1, dim).transpose(1, 2)[0] for part in parts)
            cache = torch.zeros(3, 4, 2, heads, 16, dim, dtype=dtype).to(kept)
            angles, norm = torch.ones(tokens, dim, dtype=dtype), torch.ones(dim, dtype=dtype)
            for pads, turns, norms in ((True, True, None), (False, True, None), (True, True, norm), (False, False, None)):
                ops._launch_rotate_and_write(
                    q, k, v, *((angles, angles) if turns else (None, None)), norms, norms, 0.0, 1e-6,
                    torch.arange(tokens) + 16, cache[:, 1, 0], cache[:, 1, 1], pads,
                )
assert all(size > 0 for _, size, _ in compiled.values())
assert {name for name, *_ in compiled.values()} >= {"norm_rows", "add_and_norm_rows", "gate_rows", "turn_and_write", "product_tiles", "sum_rows"}
assert all(metadata.num_warps == 1 for name, _, metadata in compiled.values() if name == "turn_and_write")
print(len(compiled))
"""


@pytest.mark.timeout(600)  # compiling takes half a minute of a core
@pytest.mark.parametrize(("capability", "which", "most"), [(90, "all", 60), (80, "some", 5), (100, "some", 5)])
def test_every_kernel_is_compiled_to_a_card_s_own_code(capability: int, which: str, most: int, tmp_path: Path) -> None:
    """Ampere has no FP8, so nothing is rounded to it there."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", _COMPILES, str(capability), which],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout) >= most
