"""Matrices in blocks, of random bits."""

from __future__ import annotations

import numpy as np

from tandem.kernels.library import BLOCKS, BlockRows

# Where each kind of block has its halves.
_HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}


def block_rows(kind: str, rows: int, inputs: int, seed: int = 0) -> BlockRows:
    """Weights of about a model's size: any bits for quants and steps, halves between 2**-9 and 2**-6 of either sign, or 0."""
    of = BLOCKS[kind]
    rng = np.random.default_rng([seed, rows, inputs, of.code])
    count = rows * inputs // of.weights
    blocks = rng.integers(0, 256, (count, of.num_bytes), dtype=np.uint8)
    for at in _HALVES.get(kind, (0, 2)):
        halves = 2.0 ** rng.uniform(-9, -6, (count, 1)) * rng.choice([-1, 0, 1, 1], (count, 1))
        blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return BlockRows(blocks.reshape(rows, -1), kind)
