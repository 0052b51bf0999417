"""Noise without state: an exponential variate for every (seed, position, index), from integer arithmetic.

It is the same on every node and device and in every batch. Logarithms are taken in float64 and then rounded:
libraries differ in the last bit of a logarithm, which rounding to float32 all but always hides.
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


def noise_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], stream: int
) -> npt.NDArray[np.int32]:
    """[N, 2]: 64 bits for each (seed, position). Streams are independent of each other."""
    place = positions.astype(np.uint64) * _U64(0xD1342543DE82EF95) + _U64(stream)
    return _mix64(_mix64(seeds + _U64(0x9E3779B97F4A7C15)) + place).view(np.int32).reshape(-1, 2)


def _fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits, shifting zeros in. In place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def hashed_indices(count: int, device: torch.device) -> torch.Tensor:
    """What `log_exponential` takes for the indices 0 .. count - 1. They may be computed once."""
    x = torch.arange(count, dtype=torch.int32, device=device)
    # int32 products wrap around, as they should.
    return _fold(_fold(_fold(x, 16).mul_(_M1), 15).mul_(_M2), 16)


def log_exponential(keys: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
    """The logarithm of an exponential variate, float32 [N, C]: for keys [N, 2] and hashed indices [N or 1, C]."""
    x = hashed ^ keys[:, :1]
    x = _fold(_fold(x, 16).mul_(_M1).add_(keys[:, 1:]), 15).mul_(_M2)
    bits = _fold(x, 16)
    # In (0, 1), never an end: 2**-33 and a multiple of 2**-32.
    uniform = bits.double().mul_(2.0**-32).add_(0.5 + 2.0**-33)
    return uniform.log_().neg_().log_().float()
