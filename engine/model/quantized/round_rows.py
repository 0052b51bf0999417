"""Rounds rows to FP8 by a Triton kernel, registered as an operation of torch. On a CPU the plain formula runs instead, so that tests can
compare the two. Triton comes with torch's CUDA builds and is imported with the first kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tandem.engine.model.pieces import to_fp8

_LIBRARY: Any = torch.library.Library("tandem", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("quantize_rows(Tensor x) -> (Tensor, Tensor)")

_LARGEST_FP8 = 448.0
_SMALLEST_SCALE = 1e-12  # the scale of a row of zeros


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [N, M] in FP8, and each row's scale: float32 [N, 1]."""
    rounded, scales = torch.ops.tandem.quantize_rows(x)
    return rounded, scales


def _plain_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).div_(_LARGEST_FP8).clamp_(min=_SMALLEST_SCALE)
    return to_fp8(wide / scales), scales


@functools.cache
def _kernel() -> tuple[Any, Any]:
    """The kernel, and the function for the size of its block. Triton reads the kernel's source when it is defined."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def round_rows(  # type: ignore[no-untyped-def]
        x, out, scales, stride, n, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        there = columns < n
        v = tl.load(x + row * stride + columns, mask=there, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(v), axis=0) / LARGEST, SMALLEST)
        v = tl.minimum(tl.maximum(v / scale, -LARGEST), LARGEST)
        tl.store(out + row * n + columns, v.to(out.dtype.element_ty), mask=there)
        tl.store(scales + row, scale)

    return round_rows, triton.next_power_of_2


def _launch_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kernel, power = _kernel()
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, n = x.shape
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        kernel[(rows,)](x, out, scales, x.stride(0), n, LARGEST=_LARGEST_FP8, SMALLEST=_SMALLEST_SCALE, BLOCK=power(n))
    return out, scales


_LIBRARY.impl("quantize_rows", _plain_quantize_rows, "CPU")
_LIBRARY.impl("quantize_rows", _launch_quantize_rows, "CUDA")
