"""Sums whose order follows from positions alone, on any device. On a GPU torch would choose an order by the number of rows, so there a
Triton kernel sums a row in one program, registered as an operation of torch. A CPU sums each row by itself. Triton comes with torch's
CUDA builds and is imported with the first kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("tandem", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("row_sums(Tensor x) -> Tensor")

_WIDEST = 2048  # how many numbers of a row are read at a time


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension. A row's sum has the same bits whatever rows are beside it."""
    sums: torch.Tensor = torch.ops.tandem.row_sums(x)
    return sums


def _plain_row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=-1)


@functools.cache
def _kernel() -> tuple[Any, Any]:
    """The kernel, and the function for the size of its block. Triton reads the kernel's source when it is defined."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def sum_rows(x, sums, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), x.dtype.element_ty)
        for start in range(0, n, BLOCK):
            at = start + columns
            total += tl.load(x + row * n + at, mask=at < n, other=0.0)
        tl.store(sums + row, tl.sum(total, axis=0))

    return sum_rows, triton.next_power_of_2


def _launch_row_sums(x: torch.Tensor) -> torch.Tensor:
    kernel, power = _kernel()
    x = x.contiguous()
    sums = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if sums.numel():
        block = min(power(x.shape[-1]), _WIDEST)
        kernel[(sums.numel(),)](x, sums, x.shape[-1], BLOCK=block, num_warps=1 if block <= 256 else 8)
    return sums


_LIBRARY.impl("row_sums", _plain_row_sums, "CPU")
_LIBRARY.impl("row_sums", _launch_row_sums, "CUDA")
