"""Drawing one token per row from its softmax, or from what restrictions leave of it.

By the Gumbel-max trick in two levels: the index with the largest `logit - log E`, with independent exponential
variates E, is distributed as the softmax. Taken first over blocks of the vocabulary, whose logit is the logarithm
of their tokens' summed weights, and then over the tokens of the block that won, it is exactly the softmax again, and
needs a few hundred variates instead of one for every token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.sampling.noise import hashed_indices, log_exponential, noise_keys
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
