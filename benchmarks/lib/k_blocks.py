"""Rounds weights to Q4_K, Q5_K and Q6_K, which the gguf package only reads. Each group is rounded between its own least and largest weight,
so llama.cpp, which searches, finds better ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def k_blocks(weights: Floats, kind: GGMLQuantizationType) -> Bytes:
    """[rows, inputs], which blocks of 256 divide, as [rows, bytes]."""
    blocks = weights.reshape(-1, 256)
    made = _q6(blocks) if kind == GGMLQuantizationType.Q6_K else _q4_or_q5(blocks, int(kind.name[1]))
    return made.reshape(weights.shape[0], -1)


def _q4_or_q5(blocks: Floats, bits: int) -> Bytes:
    groups, most = blocks.reshape(-1, 8, 32), 2**bits - 1
    least = groups.min(2).clip(max=0)
    scale, scales = _steps((groups.max(2).clip(min=0) - least) / most, 63)
    minimum, minima = _steps(-least, 63)
    quants = _quants(groups + _wide(minimum, minima)[..., None], _wide(scale, scales)[..., None], most)
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    steps = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
    fifth = (
        [(quants >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)] if bits == 5 else []
    )
    low = quants & 15
    return np.concatenate(
        [scale.view(np.uint8), minimum.view(np.uint8), *steps, *fifth, (low[:, ::2] | low[:, 1::2] << 4).reshape(-1, 128)], axis=1
    )  # fmt: skip


def _q6(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    scale, scales = _steps(np.abs(groups).max(2) / 31, 127)
    of = _wide(scale, scales)[..., None]
    quants = _quants(groups + 32 * of, of, 63).reshape(-1, 2, 4, 32)
    low, high = quants & 15, quants >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.concatenate(
        [
            (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128),
            high.sum(2, dtype=np.uint8).reshape(-1, 64),
            scales.astype(np.uint8),
            scale.view(np.uint8),
        ],
        axis=1,
    )


def _steps(values: Floats, most: int) -> tuple[npt.NDArray[np.float16], Floats]:
    """A half for each block, and how often each group has it."""
    half = (values.max(1, keepdims=True) / most).astype(np.float16)
    return half, np.rint(values / np.maximum(half.astype(np.float32), 1e-8)).clip(0, most)


def _wide(half: npt.NDArray[np.float16], steps: Floats) -> Floats:
    return half.astype(np.float32) * steps


def _quants(values: Floats, scales: Floats, most: int) -> Bytes:
    return np.rint(values / np.maximum(scales, 1e-12)).clip(0, most).astype(np.uint8)
