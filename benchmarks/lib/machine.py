"""The machine's limits, measured in the same run as the figures that are compared with them, and whether others are using it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from rich.console import Console

QUIET_CORES = 0.2  # a machine is never entirely idle
_TRY_FOR_S = _LOOK_FOR_S = 1.0


class MachineLimits(msgspec.Struct, frozen=True):
    gemm_flops: float  # per second, in large matrix products
    read_bytes: float  # per second, when a matrix far larger than any cache is read

    def __str__(self) -> str:
        return f"{self.gemm_flops / 1e9:.0f} GFLOP/s, {self.read_bytes / 1e9:.1f} GB/s"


def measure_limits(dtype: torch.dtype, device: torch.device, threads: int, *, roughly: bool = False) -> MachineLimits:
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
    product = _best(lambda: torch.mm(left, right), device)
    read = _best(lambda: torch.nn.functional.linear(vector, matrix), device)
    matrix_bytes = matrix.numel() * matrix.element_size()
    rate = matrix_bytes / read
    if device.type == "cuda":
        # A product with a vector may not reach the memory's bandwidth, so a copy, which reads and writes, is measured too.
        target = torch.empty_like(matrix)
        rate = max(rate, 2 * matrix_bytes / _best(lambda: target.copy_(matrix), device))
    return MachineLimits(2 * rows * size * size / product, rate)


def _best(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    best = float("inf")
    work()
    deadline = time.perf_counter() + _TRY_FOR_S
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def busy_cores() -> float:
    """Returns how many cores are busy at the moment. Call it while no system of the experiment runs."""
    before = _idle_ticks()
    began = time.monotonic()
    time.sleep(_LOOK_FOR_S)
    idle = (_idle_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    return max(0.0, (os.cpu_count() or 1) - idle)


def _idle_ticks() -> int:
    """Returns the ticks in which cores were idle or waited for a disk, summed over all cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[4]) + int(fields[5])


def warn_of_bystanders(console: Console, title: str) -> float:
    """Says so if others use the machine, because figures are worse for it. Returns how many cores they use."""
    busy = busy_cores()
    if busy > QUIET_CORES:
        console.print(f"{title}: others are using {busy:.1f} of the cores", style="yellow", highlight=False)
    return busy
