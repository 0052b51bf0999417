"""Sampling parameters of all known requests, as arrays over the runner's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tandem.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.structured.grammars import GrammarPosition

# Below this a temperature only asks for the most likely token.
_GREEDY_BELOW = 1e-5


class SamplingTable:
    """`set` when a request gets a row, `clear` when it leaves. What most requests don't use is kept in dicts,
    so that a batch without it costs one look at `adjusted`."""

    def __init__(self, capacity: int) -> None:
        self._allocate(capacity)
        self.params: dict[int, SamplingParams] = {}
        self.logprobs: dict[int, int] = {}
        self.prompt_logprobs: dict[int, int] = {}
        self.grammars: dict[
            int, GrammarPosition
        ] = {}  # where constrained rows stand, once they have been sampled

    def _allocate(self, capacity: int) -> None:
        self.temperature = np.zeros(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.repetition = np.ones(capacity, np.float32)
        self.presence = np.zeros(capacity, np.float32)
        self.frequency = np.zeros(capacity, np.float32)
        self.seed = np.zeros(capacity, np.uint64)
        self.penalized = np.zeros(capacity, np.bool_)
        self.edited = np.zeros(capacity, np.bool_)  # has biases, bans or a minimum length
        self.constrained = np.zeros(capacity, np.bool_)  # follows a grammar

    def set(self, row: int, params: SamplingParams) -> None:
        self.clear(row)
        if row >= len(self.seed):
            self._grow(row + 1)
        greedy = params.temperature < _GREEDY_BELOW or params.top_k == 1
        self.temperature[row] = 0.0 if greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seed[row] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.penalized[row] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.edited[row] = bool(params.logit_bias or params.bad_words or params.min_tokens > 0)
        self.constrained[row] = params.grammar is not None
        self.params[row] = params
        if params.logprobs is not None:
            self.logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = params.prompt_logprobs

    def clear(self, row: int) -> None:
        self.params.pop(row, None)
        self.logprobs.pop(row, None)
        self.prompt_logprobs.pop(row, None)
        self.grammars.pop(row, None)

    def _grow(self, at_least: int) -> None:
        old = {name: array for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        self._allocate(max(at_least, 2 * len(self.seed)))
        for name, array in old.items():
            getattr(self, name)[: len(array)] = array
