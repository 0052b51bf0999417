"""From logits to tokens, for all rows at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.model.sampling.adjust import edit_logits, penalize
from engine.model.sampling.noise import Noise, noise_keys
from engine.model.sampling.restrict import restrict
from engine.model.sampling.table import SamplingTable
from engine.model.states import RequestRows


class Sampler:
    """Chooses one token per row. A row is a request at a position: the index of the token to be chosen."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._eos = eos_token_ids
        self._noise = Noise(vocab_size, device)

    def sample(
        self,
        logits: torch.Tensor,  # [S, V]
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        requests: RequestRows,
        table: SamplingTable,
    ) -> torch.Tensor:
        """int64 [S], on the logits' device. Does not change `logits`."""
        edited, penalized = table.edited[rows].any(), table.penalized[rows].any()
        scores = logits.float()
        if (edited or penalized) and scores is logits:
            scores = logits.clone()
        if edited:
            edit_logits(scores, rows, positions, requests, table, self._eos)
        if penalized:
            penalize(scores, rows, positions, requests, table)
        # torch.max finds the first of equals, like argmax, and is faster on a CPU.
        chosen = scores.max(dim=1).indices
        random = np.flatnonzero(table.temperature[rows] > 0)
        if random.size == len(rows):
            return self._draw(scores, rows, positions, table)
        if random.size:
            index = torch.from_numpy(random).to(logits.device)
            chosen[index] = self._draw(scores[index], rows[random], positions[random], table)
        return chosen

    def _draw(
        self,
        scores: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        table: SamplingTable,
    ) -> torch.Tensor:
        device = scores.device
        scaled = scores / torch.from_numpy(table.temperature[rows]).to(device)[:, None]
        keys = torch.from_numpy(noise_keys(table.seed[rows], positions)).to(device)
        limits = restrict(scaled, table.top_k[rows], table.top_p[rows], table.min_p[rows])
        if limits is not None and limits.tokens is not None and limits.values is not None:
            values = limits.values.masked_fill(limits.values < limits.bound, float("-inf"))
            best = (
                values.sub_(self._noise.log_exponential(keys, limits.tokens)).max(dim=1, keepdim=True).indices
            )
            return limits.tokens.gather(1, best).squeeze(1)
        if limits is not None:
            scaled = scaled.masked_fill_(scaled < limits.bound, float("-inf"))
        return scaled.sub_(self._noise.log_exponential(keys)).max(dim=1).indices
