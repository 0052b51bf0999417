"""Noise without state: an exponential variate for every (seed, position, token), from integer arithmetic.

Sampling takes the token with the largest logit - log(E), where E are independent exponential variates: the
Gumbel-max trick. E is a hash of seed, position and token id, so it is the same on every node and device and in
every batch, and for any subset of the vocabulary. Logarithms are taken in float64 and then rounded: libraries
differ in the last bit of a logarithm, which rounding to float32 all but always hides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # "lowbias32": a well-mixing bijection of 32 bits
_U64 = np.uint64


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """[N, 2]: 64 bits for each (seed, position)."""
    with np.errstate(over="ignore"):
        mixed = _mix64(
            _mix64(seeds + _U64(0x9E3779B97F4A7C15)) + positions.astype(np.uint64) * _U64(0xD1342543DE82EF95)
        )
    return mixed.view(np.int32).reshape(-1, 2)


def _fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits, shifting zeros in. In place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix32(x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
    """In place; int32 products wrap around."""
    _fold(x, 16).mul_(_M1)
    if key is not None:
        x.add_(key)
    _fold(x, 15).mul_(_M2)
    return _fold(x, 16)


class Noise:
    """Noise over one model's vocabulary, on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._hashed = _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))
        self._half = torch.tensor(0.5 + 2.0**-33, dtype=torch.float64, device=device)

    def log_exponential(self, keys: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """log E, float32: [N, V] for keys [N, 2], or [N, C] for tokens [N, C] only."""
        hashed = self._hashed[None] if tokens is None else self._hashed[tokens]
        bits = _mix32(hashed ^ keys[:, :1], keys[:, 1:])
        # In (0, 1), never an end: 2**-33 and a multiple of 2**-32.
        uniform = torch.add(self._half, bits.double(), alpha=2.0**-32)
        return uniform.log_().neg_().log_().float()
