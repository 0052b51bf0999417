"""Log-probabilities of prompts. They are computed chunk by chunk, and reported together with the last one."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import torch

from tandem.engine.model.batching import RequestRows, SamplingTable, ScheduledTokens, StepOnDevice
from tandem.engine.model.runner import Batch
from tandem.engine.model.sampling.logprobs import ComputedLogprobs
from tandem.engine.model.staging import to_device
from tandem.engine.scheduling.output import ModelOutput
from tandem.wire.sampling import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptPiece:
    """Log-probabilities of some tokens of a prompt."""

    req_id: str
    first: int  # the first of those tokens
    num_prompt: int
    is_last: bool
    logprobs: ComputedLogprobs | None  # None for a piece with only the prompt's first token, which has none


class PromptLogprobs:
    def __init__(self, requests: RequestRows, table: SamplingTable) -> None:
        self._requests = requests
        self._table = table
        self._collected: dict[str, list[TokenLogprobs | None]] = {}

    def forget(self, req_id: str) -> None:
        self._collected.pop(req_id, None)

    def clear(self) -> None:
        self._collected.clear()

    def unreported(self) -> set[int]:
        """Rows of requests whose prompt log-probabilities have not been reported. A request with an output token has reported them,
        perhaps before a preemption or on another node."""
        known, prompts = self._requests.num_tokens, self._requests.num_prompt_tokens
        return {row for row in self._table.prompt_logprobs if known[row] == prompts[row]}

    def computed(
        self, rows: set[int], batch: Batch, scheduled: ScheduledTokens, logits: torch.Tensor, started: StepOnDevice
    ) -> None:
        """A pass has computed some tokens of the prompts in these rows."""
        pieces: list[_PromptPiece] = []
        for index, row in enumerate(scheduled.rows.tolist()):
            if row not in rows:
                continue
            num_prompt = int(self._requests.num_prompt_tokens[row])
            context = int(batch.host_context_lens[index])
            start, end = int(scheduled.query_start[index]), int(scheduled.query_start[index + 1])
            first = context - (end - start) + 1
            count = min(context, num_prompt - 1) - first + 1
            computed = None
            if count > 0:
                low = int(np.searchsorted(scheduled.logit_rows, start))
                following = self._requests.tokens[row, first : first + count].astype(np.int64)
                computed = ComputedLogprobs(
                    logits[low : low + count], to_device(following, logits.device), self._table.prompt_logprobs[row]
                )
            pieces.append(_PromptPiece(scheduled.req_ids[index], first, num_prompt, context >= num_prompt, computed))
        started.unread_parts.append(partial(self._read, pieces))

    def _read(self, pieces: list[_PromptPiece], output: ModelOutput) -> None:
        for piece in pieces:
            collected = self._collected.setdefault(piece.req_id, [None] * piece.num_prompt)
            if piece.logprobs is not None:
                found = piece.logprobs.read()
                collected[piece.first : piece.first + len(found)] = found
            if piece.is_last:
                output.prompt_logprobs[piece.req_id] = self._collected.pop(piece.req_id)
