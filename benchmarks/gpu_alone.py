"""What torch and FlashInfer take for a step's matrix products and its attention, with nothing around them: the part of a step's time
that its engine cannot change."""

from __future__ import annotations

import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_REPEATS = 5
# Products with the same input, which engines compute as one.
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gated", "up_proj": "gated"}


class Products:
    """The matrices of one layer with random numbers, and the head, as often as the model has layers. Experts are left out."""

    def __init__(self, folder: Path, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    shape = tuple(opened.get_slice(name).get_shape())
                    if ".layers.0." in name and len(shape) == 2 and name.endswith(".weight"):
                        word = name.split(".")[-2]
                        if ".experts." not in name:
                            shapes[_TOGETHER.get(word, word)].append(shape)
                    elif name == "lm_head.weight":
                        shapes["head"].append(shape)
        self._head: list[torch.Tensor] = []
        self._of_layer: list[torch.Tensor] = []
        for name, parts in shapes.items():
            rows = sum(shape[0] for shape in parts)
            made = torch.randn(rows, parts[0][1], device=device).to(dtype)
            (self._head if name == "head" else self._of_layer).append(made)

    def seconds(self, rows: int, sampled: int) -> float:
        """For a step of so many rows, of which so many get logits."""
        layer = sum(self._of_one(matrix, rows) for matrix in self._of_layer)
        return self._layers * layer + sum(self._of_one(matrix, sampled) for matrix in self._head)

    @staticmethod
    def _of_one(matrix: torch.Tensor, rows: int) -> float:
        given = matrix.new_ones(rows, matrix.shape[1])
        # Several in a row, so that launching them costs nothing.
        return timed(lambda: torch.nn.functional.linear(given, matrix), matrix.device, times=8)


def timed(work: Callable[[], Any], device: torch.device, times: int) -> float:
    """Seconds of one run, as the median of several measurements of `times` runs."""
    work()
    taken = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) / times)
    return statistics.median(taken)


def attention_seconds(
    layers: int,
    heads: int,
    kv_heads: int,
    dim: int,
    counts: list[int],
    contexts: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> float | None:
    """FlashInfer's own kernels for requests of so many rows and keys, in all layers; None without FlashInfer. Each request has pages of
    its own."""
    if device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    flashinfer = importlib.import_module("flashinfer")
    size = 16
    pages = torch.tensor([-(-context // size) for context in contexts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0))).int()
    cache = torch.randn(int(starts[-1]), 2, kv_heads, size, dim, device=device, dtype=dtype)
    rows = torch.cat((torch.zeros(1, dtype=torch.int64), torch.tensor(counts).cumsum(0))).int()
    last = torch.tensor([(context - 1) % size + 1 for context in contexts], dtype=torch.int32)
    hopper = torch.cuda.get_device_capability(device)[0] == 9 and max(counts) > 16
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace, "HND", backend="fa3" if hopper else "fa2"
    )
    wrapper.plan(
        rows,
        starts,
        torch.arange(int(starts[-1]), dtype=torch.int32, device=device),
        last,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        page_size=size,
        causal=True,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    query = torch.randn(int(rows[-1]), heads, dim, device=device, dtype=dtype)
    out = torch.empty_like(query)
    return layers * timed(lambda: wrapper.run(query, (cache[:, 0], cache[:, 1]), out=out), device, times=8)
