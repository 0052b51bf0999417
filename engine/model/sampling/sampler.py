"""From logits to tokens, for all rows at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.sampling.adjust import edit_logits, penalize
from tandem.engine.model.sampling.draw import TokenDraw
from tandem.engine.model.sampling.table import SamplingTable
from tandem.engine.model.staging import to_device
from tandem.engine.model.states import RequestRows
from tandem.engine.structured.masks import GrammarMasks
from tandem.wire.errors import TandemError


class Sampler:
    """Chooses one token per row. A row is a request at a position: the index of the token to be chosen."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        masks: GrammarMasks | None = None,
    ) -> None:
        self._eos = eos_token_ids
        self._drawing = TokenDraw(vocab_size, device)
        self._masks = masks
        self.failed: dict[int, TandemError] = {}  # rows of the last call that can have no token, and why

    def sample(
        self,
        logits: torch.Tensor,  # [S, V]
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        requests: RequestRows,
        table: SamplingTable,
    ) -> torch.Tensor:
        """int64 [S], on the logits' device; -1 where no token can be chosen, because a logit is not a number or
        nothing but -inf is left. Does not change `logits`."""
        edited, penalized = table.edited[rows].any(), table.penalized[rows].any()
        self.failed = {}
        constrained = self._masks is not None and table.constrained[rows].any()
        scores = logits.float()
        if (edited or penalized or constrained) and scores is logits:
            scores = logits.clone()
        if edited:
            edit_logits(scores, rows, positions, requests, table, self._eos)
        if penalized:
            penalize(scores, rows, positions, requests, table)
        if self._masks is not None and constrained:
            self._masks.apply(scores, logits, rows, positions, requests, table)
            self.failed = self._masks.failed
        random = np.flatnonzero(table.temperature[rows] > 0)
        if random.size == len(rows):
            return self._drawing.draw(scores, rows, positions, table)
        # torch.max finds the first of equals, like argmax, and is faster on a CPU. NaN is larger than anything to it.
        best = scores.max(dim=1)
        chosen = best.indices.where(best.values.isfinite(), -1)
        if random.size:
            index = to_device(random, logits.device)
            chosen[index] = self._drawing.draw(scores[index], rows[random], positions[random], table)
        return chosen
