"""The library's C interface (api.h) in ctypes. A call releases the GIL while it runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.kernels.build import Report, library_path, quiet
from tandem.kernels.compiler import BuildFailed

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class BlockKind(NamedTuple):
    code: int
    weights: int  # of a block
    num_bytes: int


BLOCKS = {
    "Q4_0": BlockKind(3, 32, 18),
    "Q4_1": BlockKind(4, 32, 20),
    "Q5_0": BlockKind(5, 32, 22),
    "Q5_1": BlockKind(6, 32, 24),
    "Q8_0": BlockKind(7, 32, 34),
    "Q4_K": BlockKind(8, 256, 144),
    "Q5_K": BlockKind(9, 256, 176),
    "Q6_K": BlockKind(10, 256, 210),
    "I4_32": BlockKind(11, 32, 22),
    "I4_64": BlockKind(12, 64, 38),
    "I4_128": BlockKind(13, 128, 70),
    "I8_32": BlockKind(14, 32, 38),
    "I8_64": BlockKind(15, 64, 70),
    "I8_128": BlockKind(16, 128, 134),
}
"""The kinds of blocks that are computed as they are: the first by their names in GGUF; integers of 4 and 8 bits, by how many have a common
scale and zero point."""

QKV, OUTPUT, GATE_UP, DOWN, HEAD = range(5)
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, FINAL_NORM = range(5)
PHASES = ("embed", "norm", "qkv", "rotary", "attention", "o", "gate_up", "down", "head")


class Spec(ctypes.Structure):
    _fields_ = (
        ("layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("dtype", c_int32),
        ("qk_norm", c_int32),
        ("eps", c_float),
    )


class WeightRows(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("rows", c_int64), ("dtype", c_int32))


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a matrix in blocks."""

    data: npt.NDArray[np.uint8]  # [rows, bytes], contiguous
    kind: str  # one of BLOCKS

    @property
    def shape(self) -> tuple[int, ...]:
        """Counted in weights."""
        kind = BLOCKS[self.kind]
        return self.data.shape[0], self.data.shape[1] // kind.num_bytes * kind.weights


Weights = torch.Tensor | BlockRows


class CacheLayout(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("blocks", c_int64),
        ("slots", c_int32),
        ("block_size", c_int32),
        ("layer_group", POINTER(c_int32)),
        ("layer_slot", POINTER(c_int32)),
        ("layer_window", POINTER(c_int32)),
        ("groups", c_int32),
    )


class StepBatch(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("requests", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("slot_mapping", POINTER(c_void_p)),
        ("block_tables", POINTER(c_void_p)),
        ("block_table_strides", POINTER(c_int64)),
        ("logit_rows", c_void_p),
        ("num_logit_rows", c_int32),
        ("given_rows", c_void_p),
        ("given", c_void_p),
        ("num_given_rows", c_int32),
    )


class KernelRows(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("count", c_int64), ("stride", c_int64), ("width", c_int64), ("dtype", c_int32))


class Heads(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("heads", c_int32),
        ("dtype", c_int32),
    )


class RotaryRows(ctypes.Structure):
    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("stride", c_int64), ("dtype", c_int32))


class KernelAttentionKind(ctypes.Structure):
    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("cache_heads", c_int32),
        ("head_dim", c_int32),
        ("group", c_int32),
        ("window", c_int32),
        ("scale", c_float),
    )


class RowUpdate(ctypes.Structure):
    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("inputs", c_int32),
        ("vectors", c_int32),
        ("begin", c_int32),
        ("end", c_int32),
        ("first", c_int32),
    )


class RowUpdates(ctypes.Structure):
    _fields_ = (
        ("updates", POINTER(RowUpdate)),
        ("slots", c_void_p),
        ("count", c_int32),
        ("num_slots", c_int32),
        ("rank", c_int32),
    )


SILU, GELU_TANH = range(2)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tandem_error": (c_char_p, []),
    "tandem_instruction_set": (c_char_p, [c_int32, c_char_p]),
    "tandem_create": (c_void_p, [POINTER(Spec), POINTER(c_int32), c_int32, c_char_p]),
    "tandem_destroy": (None, [c_void_p]),
    "tandem_load_linear": (c_int32, [c_void_p, c_int32, c_int32, POINTER(WeightRows), POINTER(WeightRows), c_int32]),
    "tandem_weight_bytes": (c_int64, [c_void_p]),
    "tandem_widen": (c_int32, [POINTER(WeightRows), c_int64, c_int32, c_void_p]),
    "tandem_load_vector": (c_int32, [c_void_p, c_int32, c_int32, POINTER(WeightRows)]),
    "tandem_use_embedding": (c_int32, [c_void_p, POINTER(WeightRows)]),
    "tandem_set_rotary": (c_int32, [c_void_p, POINTER(c_float), c_int32, c_float]),
    "tandem_write_weights": (c_int32, [c_void_p, c_int32]),
    "tandem_use_weights": (c_int32, [c_void_p, c_int32]),
    "tandem_use_cache": (c_int32, [c_void_p, POINTER(CacheLayout)]),
    "tandem_begin": (c_int32, [c_void_p, POINTER(StepBatch)]),
    "tandem_run_layers": (c_int32, [c_void_p, c_int32, c_int32]),
    "tandem_logits": (c_int32, [c_void_p, c_void_p, c_int64]),
    "tandem_logits_of": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_int64]),
    "tandem_hidden_of": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_int64]),
    "tandem_profile": (c_int32, [c_void_p, c_int32, POINTER(c_int64)]),
    "tandem_operations_create": (c_void_p, [c_int32, POINTER(c_int32), c_int32, c_char_p]),
    "tandem_operations_destroy": (None, [c_void_p]),
    "tandem_lanes": (c_int32, [c_void_p]),
    "tandem_meetings": (c_int64, [c_void_p]),
    "tandem_add_linear": (c_int32, [c_void_p, POINTER(WeightRows), POINTER(WeightRows), c_int32, c_int32, c_int32]),
    "tandem_add_norm": (c_int32, [c_void_p, POINTER(WeightRows), c_float, c_float]),
    "tandem_add_attention": (c_int32, [c_void_p, POINTER(KernelAttentionKind)]),
    "tandem_operations_use_cache": (c_int32, [c_void_p, POINTER(CacheLayout)]),
    "tandem_linear_rows": (c_int32, [c_void_p, c_int32, POINTER(KernelRows), POINTER(KernelRows), POINTER(RowUpdates)]),
    "tandem_gated_rows": (
        c_int32,
        [
            c_void_p,
            c_int32,
            c_int32,
            c_int32,
            POINTER(KernelRows),
            POINTER(KernelRows),
            POINTER(RowUpdates),
            POINTER(RowUpdates),
        ],
    ),
    "tandem_norm_rows": (c_int32, [c_void_p, c_int32, POINTER(KernelRows), POINTER(KernelRows)]),
    "tandem_update_rows": (c_int32, [c_void_p, POINTER(RowUpdates), POINTER(KernelRows), POINTER(KernelRows)]),
    "tandem_operations_begin": (c_int32, [c_void_p, POINTER(StepBatch)]),
    "tandem_attend": (
        c_int32,
        [
            c_void_p,
            c_int32,
            c_int32,
            POINTER(Heads),
            POINTER(Heads),
            POINTER(Heads),
            POINTER(RotaryRows),
            POINTER(KernelRows),
        ],
    ),
}


_loading = threading.Lock()
_outcome: list[ctypes.CDLL | BuildFailed] = []


def load(report: Report = quiet) -> ctypes.CDLL:
    """Returns the library. Raises BuildFailed if there is none and it cannot be compiled, which a process tries once. `report` is called
    while it is compiled."""
    with _loading:
        if not _outcome:
            try:
                _outcome.append(_load(report))
            except BuildFailed as error:
                _outcome.append(error)
    found = _outcome[0]
    if isinstance(found, BuildFailed):
        raise BuildFailed(str(found)) from found
    return found


def _load(report: Report) -> ctypes.CDLL:
    path = library_path(report)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"the native library cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def path() -> Path:
    """The file of the library that this process uses."""
    return Path(load()._name)


def last_error() -> str:
    error: Callable[[], bytes] = load().tandem_error
    return error().decode()


def instruction_set(dtype: torch.dtype, limit: str = "") -> str | None:
    """Returns the instruction set that a model of this dtype would use here: amx, avx512bf16, avx512, avx2 or portable. None: none."""
    code = DTYPES.get(dtype)
    found: bytes | None = None if code is None else load().tandem_instruction_set(code, limit.encode())
    return found.decode() if found else None


def part(weights: Weights) -> WeightRows:
    """Points into the weights, which must be contiguous and outlive the call."""
    if isinstance(weights, BlockRows):
        return WeightRows(weights.data.ctypes.data, weights.data.shape[0], BLOCKS[weights.kind].code)
    return WeightRows(weights.data_ptr(), weights.shape[0], DTYPES[weights.dtype])


def widen(rows: BlockRows, dtype: torch.dtype) -> torch.Tensor:
    """The weights as an ordinary matrix: in float32 as their format defines them, in bfloat16 rounded once."""
    out = torch.empty(rows.shape, dtype=dtype)
    status: int = load().tandem_widen(part(rows), rows.shape[1], DTYPES[dtype], out.data_ptr())
    if status != 0:
        raise ValueError(last_error())
    return out
