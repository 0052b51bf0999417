"""The runner's state of each request, one row each in plain arrays: tokens, block tables (`RequestRows`) and sampling parameters
(`SamplingTable`).

Whole batches are read with one indexed load instead of a loop over requests. The row freed last is reused first, because its
memory has been touched already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandem.engine.scheduling.output import BlockIds
from tandem.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.structured.grammars import GrammarPosition

IntArray = npt.NDArray[np.int32]


class RequestRows:
    """Rows of a fixed width for `capacity` requests. It doubles if there are ever more."""

    def __init__(
        self, capacity: int, max_tokens: int, block_size: int, num_groups: int, num_state_blocks: int = 0
    ) -> None:
        """Makes `num_groups` tables that grow with the tokens. For models with recurrent states one more table follows, with
        `num_state_blocks` blocks per request."""
        self._row_of: dict[str, int] = {}
        self._num_added = 0
        self._block_size = block_size
        self._free = list(range(capacity - 1, -1, -1))
        max_blocks = -(-max_tokens // block_size)
        # Zeroed memory takes no pages until it is written.
        self.tokens: IntArray = np.zeros((capacity, max_tokens), np.int32)
        self.num_tokens: IntArray = np.zeros(capacity, np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(capacity, np.int32)
        # How many leading tokens are placeholders for `embeds`, and no real token ids.
        self.num_unsaid: IntArray = np.zeros(capacity, np.int32)
        self.num_computed: IntArray = np.zeros(capacity, np.int32)
        # A new number each time that a request gets a row. A caller that kept it can tell whether the row is still the same
        # request's.
        self.tenancies: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        widths = [max_blocks] * num_groups + [num_state_blocks] * (num_state_blocks > 0)
        self.num_token_tables = num_groups
        self.tables: list[IntArray] = [np.zeros((capacity, width), np.int32) for width in widths]
        self._num_blocks: list[IntArray] = [np.zeros(capacity, np.int32) for _ in widths]

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def req_ids(self) -> list[str]:
        return list(self._row_of)

    def row(self, req_id: str) -> int:
        return self._row_of[req_id]

    def rows(self, req_ids: list[str]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self._row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def add(self, req_id: str, token_ids: list[int], num_prompt_tokens: int, block_ids: BlockIds) -> int:
        """Adds a request, or replaces the row of its id. Returns the row."""
        row = self._row_of.get(req_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[req_id] = self._free.pop()
        self.tokens[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_unsaid[row] = 0
        self._num_added += 1
        self.tenancies[row] = self._num_added
        self._clear_tables(row)
        self.append_blocks(row, block_ids)
        return row

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        for table, counts, ids in zip(self.tables, self._num_blocks, block_ids, strict=True):
            if ids:
                start = int(counts[row])
                table[row, start : start + len(ids)] = ids
                counts[row] = start + len(ids)

    def num_slots(self, row: int, table: int) -> int:
        """How many tokens the row has slots for in one of its tables."""
        return int(self._num_blocks[table][row]) * self._block_size

    def append_tokens(self, row: int, token_ids: list[int]) -> None:
        start = int(self.num_tokens[row])
        self.tokens[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] = start + len(token_ids)

    def remove(self, req_id: str) -> int | None:
        row = self._row_of.pop(req_id, None)
        if row is not None:
            self._clear_tables(row)
            self.tenancies[row] = 0
            self._free.append(row)
        return row

    def _clear_tables(self, row: int) -> None:
        for table, counts in zip(self.tables, self._num_blocks, strict=True):
            table[row, : counts[row]] = 0
            counts[row] = 0

    def _grow(self) -> None:
        old = len(self.num_tokens)
        for name in ("tokens", "num_tokens", "num_prompt_tokens", "num_unsaid", "num_computed", "tenancies"):
            setattr(self, name, _doubled(getattr(self, name)))
        self.tables = [_doubled(table) for table in self.tables]
        self._num_blocks = [_doubled(counts) for counts in self._num_blocks]
        self._free.extend(range(2 * old - 1, old - 1, -1))


def _doubled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    grown = np.zeros((2 * array.shape[0], *array.shape[1:]), array.dtype)
    grown[: array.shape[0]] = array
    return grown


# A lower temperature counts as greedy sampling.
_GREEDY_BELOW = 1e-5


class SamplingTable:
    """Sampling parameters by row. The runner calls `set` when a request gets a row and `clear` when it leaves. Parameters that few
    requests use are kept in dicts, so that they cost other batches almost nothing."""

    def __init__(self, capacity: int) -> None:
        self._allocate(capacity)
        self.params: dict[int, SamplingParams] = {}
        self.logprobs: dict[int, int] = {}
        self.prompt_logprobs: dict[int, int] = {}
        # The position of each constrained row in its grammar, from its first sampled token on.
        self.grammars: dict[int, GrammarPosition] = {}

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
        self.edited = np.zeros(capacity, np.bool_)  # has logit biases, bad words or a minimum length
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
