"""The machine's limits, measured in the same run as the figures that are compared with them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch


class MachineLimits(msgspec.Struct, frozen=True):
    gemm_flops: float  # per second, in large matrix products
    read_bytes: float  # per second, when a matrix far larger than any cache is read


def measure_limits(
    dtype: torch.dtype, device: torch.device, threads: int, seconds: float = 1.0, *, roughly: bool = False
) -> MachineLimits:
    """Returns the best of many tries, because a limit is what is reached when nothing disturbs. `roughly` takes small matrices, for callers to
    whom the figure does not matter: a CPU without bfloat16 takes seconds for a large one."""
    torch.set_num_threads(threads)
    rows, size, wide = (512, 2048, 8192) if device.type == "cpu" else (8192, 8192, 16384)
    if roughly:
        rows, size, wide = 64, 512, 2048
    left = torch.randn(rows, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    matrix = torch.randn(wide, wide, device=device).to(dtype)
    vector = torch.randn(1, wide, device=device).to(dtype)
    product = _best(lambda: torch.mm(left, right), device, seconds)
    read = _best(lambda: torch.nn.functional.linear(vector, matrix), device, seconds)
    matrix_bytes = matrix.numel() * matrix.element_size()
    rate = matrix_bytes / read
    if device.type == "cuda":
        # A product with a vector may not reach the memory's bandwidth, so a copy, which reads and writes, is measured too.
        target = torch.empty_like(matrix)
        rate = max(rate, 2 * matrix_bytes / _best(lambda: target.copy_(matrix), device, seconds))
    return MachineLimits(2 * rows * size * size / product, rate)


def _best(work: Callable[[], torch.Tensor], device: torch.device, seconds: float) -> float:
    best = float("inf")
    work()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
