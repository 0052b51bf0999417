"""Drawing one token per row from its softmax, or from what restrictions leave of it.

By the Gumbel-max trick in two levels: the index with the largest `logit - log E`, with independent exponential
variates E, is distributed as the softmax. Taken first over blocks of the vocabulary, whose logit is the logarithm
of their tokens' summed weights, and then over the tokens of the block that won, it is exactly the softmax again, and
needs a few hundred variates instead of one for every token.

The noise has no state: a variate is a function of (seed, position, index), in integer arithmetic, so it is the same on
every node and device and in every batch. Logarithms are taken in float64 and then rounded: libraries differ in the last
bit of a logarithm, which rounding to float32 almost always hides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.sampling.restrict import LogitRows, lower_bounds
from tandem.engine.model.sampling.table import SamplingTable
from tandem.engine.model.staging import to_device

_BLOCK = 256
_NEVER = float("-inf")


class TokenDraw:
    """Over one model's vocabulary, on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._num_blocks = -(-vocab_size // _BLOCK)
        self._blocks = hashed_indices(self._num_blocks, device)[None]
        self._tokens = hashed_indices(self._num_blocks * _BLOCK, device).view(-1, _BLOCK)

    def draw(
        self,
        scores: torch.Tensor,  # [N, V] float32; -inf is never drawn
        requests: npt.NDArray[np.int64],  # their rows in the table
        positions: npt.NDArray[np.int64],
        table: SamplingTable,
    ) -> torch.Tensor:
        """int64 [N]; -1 for a row that holds NaN or infinity, or nothing but -inf"""
        device, count = scores.device, len(requests)
        temperature = to_device(table.temperature[requests], device)[:, None]
        scaled = scores / temperature
        if padding := self._num_blocks * _BLOCK - self._vocab:
            scaled = torch.nn.functional.pad(scaled, (0, padding), value=_NEVER)
        rows = LogitRows(scaled)
        bound = lower_bounds(
            rows, self._vocab, table.top_k[requests], table.top_p[requests], table.min_p[requests]
        )
        seeds = table.seed[requests]
        first, second = (to_device(noise_keys(seeds, positions, stream), device) for stream in (0, 1))
        sums = self._block_sums(rows, bound)
        # Whatever is not a number wins, and says so.
        won, block = sums.log_().sub_(log_exponential(first, self._blocks)).max(dim=1)
        inside = scaled.view(count, self._num_blocks, _BLOCK)[torch.arange(count, device=device), block]
        if bound is not None:
            inside.masked_fill_(inside < bound, _NEVER)
        best, token = inside.sub_(log_exponential(second, self._tokens[block])).max(dim=1)
        return (block * _BLOCK + token).where(won.isfinite() & best.isfinite(), -1)

    def _block_sums(self, rows: LogitRows, bound: torch.Tensor | None) -> torch.Tensor:
        """[N, blocks]: the weights of all tokens that are in, by block."""
        if bound is None:
            return self._summed(rows.weights)
        if bound.device.type != "cpu":
            return self._summed(rows.weights.masked_fill(rows.scaled < bound, 0))
        # Usually all that is in is among the candidates. Each row goes its own way, whatever the others do.
        values, tokens = rows.candidates
        few = values[:, -1] < bound[:, 0]
        each = (values - rows.largest).exp_().masked_fill_(values < bound, 0)
        sums = torch.zeros(len(bound), self._num_blocks)
        sums.scatter_add_(1, tokens // _BLOCK, each)
        if not bool(few.all()):
            many = torch.nonzero(~few)[:, 0]
            sums[many] = self._summed(rows.weights[many].masked_fill_(rows.scaled[many] < bound[many], 0))
        return sums

    def _summed(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.view(weights.shape[0], self._num_blocks, _BLOCK).sum(dim=2)


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
