"""Masks the logits of rows with a grammar, so that they choose only tokens that it allows."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from tandem.base.errors import InternalError, TandemError
from tandem.engine.model.batching import RequestRows, SamplingTable
from tandem.engine.model.parts import RunnerPart
from tandem.engine.model.staging import to_device
from tandem.engine.structured.grammars import BitMask, GrammarPosition, TokenizerGrammars

_BANNED = float("-inf")
# A model that cuts a grammar's words in its own way, so many times in a row, is left alone for the rest of the answer.
MOST_IN_VAIN = 2
# All requests share a step, and a grammar may force a text without end. For common schemas it takes a tenth of this time.
SLOW_S, MOST_SLOW = 0.002, 2


def unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    """bool [N, count]: the bits of bytes [N, B], each byte's lowest bit first. The device unpacks them, so that for 256 rows of a
    large vocabulary 4 MiB are copied instead of 32."""
    bit = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, :, None] >> bit).bitwise_and_(1)
    return bits.view(torch.bool).flatten(1)[:, :count]


class GrammarMasks(RunnerPart):
    """The masks of one sampler (engine.model.parts.TokenMasks). Each row's position in its grammar moves forward or back to match the
    request's tokens before it is used, whatever happened to the request since."""

    def __init__(self, grammars: TokenizerGrammars) -> None:
        self.grammars = grammars
        # Of each row with a grammar, from its first sampled token on.
        self._positions: dict[int, GrammarPosition] = {}
        self.failed: dict[int, TandemError] = {}  # by row, why a request of the last `apply` cannot go on

    def clear(self, row: int) -> None:
        self._positions.pop(row, None)

    def apply(
        self,
        scores: torch.Tensor,  # [S, V] float32, changed in place
        logits: torch.Tensor,  # [S, V], as they came from the model
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        requests: RequestRows,
        table: SamplingTable,
    ) -> None:
        """Masks the constrained rows. If logit biases or bans have excluded every token that the grammar allows, the allowed ones
        get their logits back, because one must be chosen. Rows after a draft that the grammar forbids are left alone, because the
        rejected draft makes them void. Of a row after drafts that cost too much to follow no token can be chosen."""
        self.failed = {}
        which: list[int] = []
        masks: list[BitMask] = []
        lost: dict[int, int] = {}  # the first such index of each row
        for index in np.flatnonzero(table.constrained[rows]).tolist():
            row, position = int(rows[index]), int(positions[index])
            if row in self.failed or row in lost:
                continue
            try:
                mask = self._mask(row, position, requests, table)
            except TandemError as error:
                self.clear(row)  # the library's error would last
                if position <= int(requests.num_tokens[row]):
                    self.failed[row] = error
                else:
                    lost[row] = index
                continue
            if mask is not None:
                which.append(index)
                masks.append(mask)
        if lost:
            scores[to_device(np.array(list(lost.values())), scores.device)] = _BANNED
        if not which:
            return
        refused = unpacked(to_device(np.stack(masks).view(np.uint8), scores.device), scores.shape[1]).logical_not_()
        chosen = to_device(np.array(which), scores.device)
        masked = scores[chosen].masked_fill_(refused, _BANNED)
        if table.edited[rows[which]].any():
            nothing_left = masked.amax(dim=1, keepdim=True) == _BANNED
            unedited = logits[chosen].float().masked_fill_(refused, _BANNED)
            masked = torch.where(nothing_left, unedited, masked)
        scores[chosen] = masked

    def num_allowed(self, row: int, drafts: list[int], requests: RequestRows, table: SamplingTable) -> int:
        try:
            if (found := self._caught_up(row, requests, table)) is None:
                return 0
            allowed = found.follow(drafts)
            found.go_back(found.num_certain)
        except TandemError:
            self.clear(row)  # the error may be the drafts', and would last; the next step reports the answer's own
            return 0
        return allowed

    def forced(self, row: int, most: int, requests: RequestRows, table: SamplingTable) -> list[int]:
        try:
            found = self._caught_up(row, requests, table)
        except TandemError:
            return []
        if found is None:
            return []
        if found.expected is not None:
            place, token = found.expected
            was = int(requests.tokens[row, int(requests.num_prompt_tokens[row]) + place])
            found.in_vain = 0 if was == token else found.in_vain + 1
            found.expected = None
        if found.in_vain >= MOST_IN_VAIN or found.slow >= MOST_SLOW:
            return []
        began = time.perf_counter()
        drafts = found.forced()[:most]
        found.slow += time.perf_counter() - began > SLOW_S
        if drafts:
            found.expected = found.num_certain, drafts[0]
        return drafts

    def _caught_up(self, row: int, requests: RequestRows, table: SamplingTable) -> GrammarPosition | None:
        """The row's position after all its tokens; None if the answer has ended or cannot go on, which the next step reports."""
        answered = int(requests.num_tokens[row]) - int(requests.num_prompt_tokens[row])
        found = self._position(row, table)
        if found.num_tokens > found.num_certain:
            found.go_back(found.num_certain)
        if found.num_tokens < answered:
            start = int(requests.num_prompt_tokens[row]) + found.num_tokens
            found.follow(requests.tokens[row, start : start + answered - found.num_tokens].tolist())
        if found.num_tokens != answered:
            return None
        found.num_certain = answered
        return found

    def _position(self, row: int, table: SamplingTable) -> GrammarPosition:
        found = self._positions.get(row)
        if found is None:
            found = self._positions[row] = self.grammars.begin(table.params[row].grammar or "")
        return found

    def _mask(self, row: int, position: int, requests: RequestRows, table: SamplingTable) -> BitMask | None:
        """The mask for the token at `position`; None if the grammar forbids a draft before it."""
        found = self._position(row, table)
        first, known = int(requests.num_prompt_tokens[row]), int(requests.num_tokens[row])
        wanted = position - first
        if position <= known and found.num_tokens > found.num_certain:
            # Forget the last step's drafts. Those that were accepted are among the request's tokens now.
            found.go_back(found.num_certain)
        if found.num_tokens < wanted:
            found.follow(requests.tokens[row, first + found.num_tokens : position].tolist())
        if position <= known:
            if found.num_tokens != wanted:
                raise InternalError(f"the answer's token {found.num_tokens} does not follow its grammar")
            found.num_certain = wanted
        elif found.num_tokens < wanted:
            return None
        mask: BitMask = self.grammars.empty_masks(1)[0]
        found.fill(mask)
        return mask
