"""Calls single kernels of the native library (probe.h) on float32 tensors."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from tandem.kernels import library

UNITS = ("amx", "avx512bf16", "avx512", "avx2", "portable")
ROUNDING = ("amx", "avx512bf16")  # the units that round activations to bfloat16; the others keep float32
STORE, ADD, SILU_MUL = range(3)


class Shape(ctypes.Structure):
    _fields_ = (("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("window", c_int32), ("eps", c_float))


_PART = POINTER(library.WeightRows)
_SIGNATURES: dict[str, list[Any]] = {
    "tandem_probe_gemm": [
        *(c_int32, c_char_p, c_int32, c_int32, c_int32, c_int32, c_void_p),
        *(_PART, _PART, c_int32, c_int32, c_int32, c_void_p),
    ],
    "tandem_probe_norm": [c_int32, c_char_p, c_int32, c_int32, c_void_p, c_void_p, c_float, c_void_p],
    "tandem_probe_rotary": [
        *(c_int32, c_char_p, POINTER(Shape), POINTER(library.CacheLayout), c_int32),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ],
    "tandem_probe_attention": [
        *(c_int32, c_char_p, POINTER(Shape), POINTER(library.CacheLayout), POINTER(library.StepBatch)),
        *(c_void_p, c_int32, c_void_p),
    ],
}


def available() -> list[tuple[torch.dtype, str]]:
    """(dtype, unit) pairs that this processor runs."""
    return [
        (dtype, unit)
        for dtype in (torch.float32, torch.bfloat16)
        for unit in UNITS
        if library.instruction_set(dtype, unit) == unit
    ]


def _call(name: str, *arguments: Any) -> None:
    function = getattr(library.load(), name)
    function.restype, function.argtypes = c_int32, _SIGNATURES[name]
    if function(*arguments) != 0:
        raise RuntimeError(f"{name}: {library.last_error()}")


def _parts(weights: Sequence[library.Weights] | None) -> Any:
    return None if weights is None else (library.WeightRows * len(weights))(*map(library.part, weights))


def gemm(
    dtype: torch.dtype,
    unit: str,
    kind: int,
    x: torch.Tensor,
    weights: Sequence[library.Weights],
    biases: list[torch.Tensor] | None = None,
    y: torch.Tensor | None = None,
    threads: int = 1,
    compact: bool = True,
) -> torch.Tensor:
    """Multiplies. `compact`: keep the weights compact if the unit can, however many outliers they have."""
    m, k = x.shape
    n = sum(weight.shape[0] for weight in weights)
    out = torch.empty(m, n // 2 if kind == SILU_MUL else n) if y is None else y.clone()
    _call(
        "tandem_probe_gemm",
        *(library.DTYPES[dtype], unit.encode(), kind, m, n, k, x.contiguous().data_ptr()),
        *(_parts(weights), _parts(biases), len(weights), threads, compact, out.data_ptr()),
    )
    return out


def norm(dtype: torch.dtype, unit: str, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _call(
        "tandem_probe_norm",
        *(library.DTYPES[dtype], unit.encode(), *x.shape, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr()),
    )
    return out


def _layout(cache: torch.Tensor) -> library.CacheLayout:
    zero = (c_int32 * 1)()
    return library.CacheLayout(
        data=cache.data_ptr(), blocks=cache.shape[0], slots=cache.shape[1], block_size=cache.shape[4], layer_group=zero,
        layer_slot=zero, layer_window=zero, groups=1
    )  # fmt: skip


def _shape(cache: torch.Tensor, heads: int, window: int = 0) -> Shape:
    return Shape(heads, cache.shape[3], cache.shape[5], window, 1e-5)


def rotary(
    unit: str,
    cache: torch.Tensor,
    heads: int,
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Returns q, k and v after the kernel. It has stored K and V in slot 0 of the cache."""
    out = qkv.clone()
    q_norm, k_norm = norms if norms else (None, None)
    _call(
        "tandem_probe_rotary",
        *(library.DTYPES[cache.dtype], unit.encode(), _shape(cache, heads), _layout(cache), qkv.shape[0]),
        *(out.data_ptr(), table.data_ptr(), positions.data_ptr(), slots.data_ptr()),
        *(None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr()),
    )
    return out


@dataclasses.dataclass
class Requests:
    """The tokens that attend: the last `queries[i]` tokens of request i, whose context has `contexts[i]`."""

    queries: list[int]
    contexts: list[int]
    tables: torch.Tensor  # int32 [requests, blocks]


def attention(
    unit: str, cache: torch.Tensor, requests: Requests, q: torch.Tensor, window: int = 0, threads: int = 1
) -> torch.Tensor:
    """q [tokens, heads, head_dim]."""
    starts = torch.tensor([0, *requests.queries]).cumsum(0).int()
    contexts = torch.tensor(requests.contexts, dtype=torch.int32)
    tables = requests.tables.contiguous()
    pointers = (c_void_p * 1)(tables.data_ptr())
    batch = library.StepBatch(
        tokens=q.shape[0], requests=len(requests.queries), query_start=starts.data_ptr(),
        context_lens=contexts.data_ptr(), block_tables=pointers, block_table_strides=(c_int64 * 1)(tables.stride(0))
    )  # fmt: skip
    q, out = q.contiguous(), torch.empty_like(q)
    _call(
        "tandem_probe_attention",
        *(library.DTYPES[cache.dtype], unit.encode(), _shape(cache, q.shape[1], window), _layout(cache), batch),
        *(q.data_ptr(), threads, out.data_ptr()),
    )
    return out
