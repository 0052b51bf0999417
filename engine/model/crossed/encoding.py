"""The runner's part of a model with an encoder: runs the encoder over a request's whole prompt when a step computes a part of it.

Each token's row depends on all of them, so the encoder is not cut into chunks. Its rows are kept while further chunks need them,
and made again for a request that comes back after it lost its blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from tandem.engine.model.attention.interface import attention_through, own_eager
from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.crossed.forward import CrossedModel
from tandem.engine.model.parts import RunnerPart
from tandem.engine.model.runner import Batch
from tandem.engine.model.staging import to_device


class EncodedPrompts(RunnerPart):
    def __init__(self, crossed: CrossedModel) -> None:
        self._model, self._opening = crossed.model, len(crossed.opening)
        # What the encoder made, by the request's row, while further chunks of its prompt follow.
        self._kept: dict[int, torch.Tensor] = {}

    def clear(self, row: int) -> None:
        self._kept.pop(row, None)

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        lengths = requests.num_prompt_tokens[scheduled.rows].astype(np.int64) - self._opening
        contexts = batch.host_context_lens
        first = contexts - np.diff(batch.host_query_start)
        states = []
        for index in np.flatnonzero(first < lengths).tolist():
            row, length = int(scheduled.rows[index]), int(lengths[index])
            made = self._kept.pop(row, None)
            if made is None:
                made = encoded(
                    self._model, to_device(requests.tokens[row, :length].astype(np.int64), batch.token_ids.device)
                )
            if contexts[index] < length:
                self._kept[row] = made
            states.append(made[int(first[index]) : int(contexts[index])])
        return dataclasses.replace(batch, encoder_lens=lengths, encoder_states=torch.cat(states) if states else None)


def encoded(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Runs the encoder over one prompt, with the model's own attention: [tokens, width]."""
    with attention_through(eagerly):
        made: torch.Tensor = model.get_encoder()(input_ids=token_ids[None]).last_hidden_state[0]
    return made


def eagerly(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention as the model's own file computes it."""
    eager = own_eager(module)
    assert eager is not None  # CrossedModel is made only of types whose files have one
    return eager(module, *args, **kwargs)[0], None
