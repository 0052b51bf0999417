"""Matrices in blocks, of random bits."""

from __future__ import annotations

import numpy as np

from tandem.kernels.library import BLOCKS, BlockRows

GGUF = [kind for kind in BLOCKS if kind.startswith("Q")]

# Where each kind of GGUF's blocks has its halves.
_HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}


def block_rows(kind: str, rows: int, inputs: int, seed: int = 0) -> BlockRows:
    """Weights of about a model's size: any bits for quants and steps, halves between 2**-9 and 2**-6 of either sign, or 0."""
    of = BLOCKS[kind]
    rng = np.random.default_rng([seed, rows, inputs, of.code])
    count = rows * inputs // of.weights
    blocks = rng.integers(0, 256, (count, of.num_bytes), dtype=np.uint8)
    if kind not in GGUF:  # a float and a zero point
        floats = 2.0 ** rng.uniform(-9, -6, (count, 1)) * rng.choice([-1, 0, 1, 1], (count, 1))
        blocks[:, :4] = floats.astype("<f4").view(np.uint8)
        blocks[:, 4:6] = (
            (rng.integers(0, 17, (count, 1)) if kind.startswith("I4") else rng.integers(-128, 129, (count, 1)))
            .astype("<i2")
            .view(np.uint8)
        )
        return BlockRows(blocks.reshape(rows, -1), kind)
    for at in _HALVES.get(kind, (0, 2)):
        halves = 2.0 ** rng.uniform(-9, -6, (count, 1)) * rng.choice([-1, 0, 1, 1], (count, 1))
        blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return BlockRows(blocks.reshape(rows, -1), kind)
