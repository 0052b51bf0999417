"""The runner's state of each request, one row each in plain arrays: tokens, block tables (`RequestRows`) and sampling parameters
(`SamplingTable`). Makes a step's batch of them: flattens its requests' rows, cuts it into passes, and tracks the sampled tokens
that the host does not have yet.

Whole batches are read with one indexed load instead of a loop over requests. The row freed last is reused first, because its
memory has been touched already.

A step whose prompts need logits at every position is computed in several passes. A row of logits is as long as the vocabulary,
so the logits of a whole chunk would take more memory than the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem.base.errors import InternalError, TandemError
from tandem.engine.model.runner import Batch, HostBatch, LayerHooks
from tandem.engine.model.sampling.logprobs import ComputedLogprobs
from tandem.engine.model.staging import DeviceMark, HostCopy, to_device_together
from tandem.engine.scheduling.output import BlockIds, ModelOutput
from tandem.wire.sampling import SamplingParams

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
        self.silent: set[int] = set()  # rows of requests that sample no token, such as those for a vector
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
        self.silent.discard(row)
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
            self.silent.discard(row)
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
        # Tokens and what is added to their logits: read from a dict of all tokens with each step, they would hold it up.
        self.biases: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}

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
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.edited[row] = bool(params.logit_bias or params.bad_words or params.min_tokens > 0)
        self.constrained[row] = params.grammar is not None
        self.params[row] = params
        if bias := params.logit_bias:
            self.biases[row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        if params.logprobs is not None:
            self.logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = params.prompt_logprobs

    def clear(self, row: int) -> None:
        self.params.pop(row, None)
        self.biases.pop(row, None)
        self.logprobs.pop(row, None)
        self.prompt_logprobs.pop(row, None)

    def _grow(self, at_least: int) -> None:
        old = {name: array for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        self._allocate(max(at_least, 2 * len(self.seed)))
        for name, array in old.items():
            getattr(self, name)[: len(array)] = array


# The most rows of logits in one pass, beyond those that tokens are sampled from.
LOGIT_ROWS = 256
_NONE = np.zeros(0, np.int64)


def cut_for_logits(requests: RequestRows, num_scheduled: dict[str, int], every_row: set[int]) -> list[dict[str, int]]:
    """Returns how many tokens of each request every pass computes. `every_row` are rows of requests that need logits for every
    token.

    The first passes compute what these requests have beyond their share of LOGIT_ROWS; the last pass computes everything else,
    with the last token of every request. A prompt's chunk may be cut anywhere without changing its result.
    """
    wanting = [req_id for req_id in num_scheduled if requests.row(req_id) in every_row] if every_row else []
    share = max(1, LOGIT_ROWS // max(1, len(wanting)))
    passes: list[dict[str, int]] = []
    rest = dict(num_scheduled)
    for req_id in wanting:
        while rest[req_id] > share:
            count = min(LOGIT_ROWS, rest[req_id] - share)
            passes.append({req_id: count})
            rest[req_id] -= count
    return [*passes, rest]


class _Loads:
    """The hooks of a step's first pass: it waits for loads, and a later pass reports saves."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def wait_for_layer_load(self, layer: int) -> None:
        self._hooks.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        pass


class _Saves:
    """The hooks of a step's last pass: the step's KV of a layer is complete once this pass has written it."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        self._hooks.save_kv_layer(layer)


def hooks_of_pass(hooks: LayerHooks | None, first: bool, last: bool) -> LayerHooks | None:
    if hooks is None or (first and last):
        return hooks
    if first:
        return _Loads(hooks)
    return _Saves(hooks) if last else None


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadTokens:
    """Tokens that a step has sampled on the device and that the host does not have yet."""

    rows: npt.NDArray[np.int64]  # their requests' rows, each once
    tokens: torch.Tensor  # int64, on the device; below 0 for a request that can have none


@dataclasses.dataclass(slots=True)
class ScheduledTokens:
    """The requests of one pass, as arrays in batch order."""

    req_ids: list[str]
    rows: npt.NDArray[np.int64]  # indices into RequestRows
    num_drafts: npt.NDArray[np.int64]  # how many of the last scheduled tokens are drafts
    samples: npt.NDArray[np.bool_]  # the pass computes the request's newest token, so it samples the next
    # The first of the request's num_drafts + 1 rows of logits to sample from.
    first_sample: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]  # the batch's, in host memory


def build_batch(
    requests: RequestRows,
    num_scheduled: dict[str, int],
    drafts: dict[str, list[int]],
    wants_prompt_logprobs: set[int],
    block_size: int,
    device: torch.device,
    unread: UnreadTokens | None = None,
) -> tuple[Batch, ScheduledTokens]:
    """Makes the batch of one pass. `wants_prompt_logprobs` are rows of requests whose prompt positions need logits, too.
    `unread` has the tokens after those that the host knows; with it there are no drafts."""
    req_ids = list(num_scheduled)
    rows = requests.rows(req_ids)
    lengths = np.fromiter(num_scheduled.values(), np.int64, len(req_ids))
    num_drafts = _put_drafts(requests, drafts, req_ids)
    contexts = requests.num_computed[rows] + lengths
    # Decodes come first, then the shorter chunks, because kernels take them apart from the longer ones. Decodes are sorted by context
    # length, because attention takes requests of similar length together.
    order = np.lexsort((contexts, lengths))
    rows, lengths, contexts, num_drafts = rows[order], lengths[order], contexts[order], num_drafts[order]

    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    total = int(query_start[-1])
    positions = np.arange(total) - np.repeat(query_start[1:] - contexts, lengths)
    row_of_token = np.repeat(rows, lengths)
    token_ids = requests.tokens[row_of_token, positions].astype(np.int64)
    slots, tables = _slots_and_tables(requests, rows, row_of_token, positions, int(contexts.max()), block_size)

    samples = contexts - num_drafts >= requests.num_tokens[rows]
    if requests.silent:
        samples &= ~np.isin(rows, list(requests.silent))
    first = query_start[1:] - 1 - num_drafts
    wanted = np.zeros(total, np.bool_)
    wanted[first[np.flatnonzero(samples)]] = True
    for index in np.flatnonzero(num_drafts * samples).tolist():
        wanted[first[index] : query_start[index + 1]] = True
    for index in _members(rows, wants_prompt_logprobs):
        start, end = query_start[index], query_start[index + 1]
        wanted[start:end] |= positions[start:end] + 1 < requests.num_prompt_tokens[rows[index]]
    logit_index = np.cumsum(wanted) - 1

    logit_rows = np.flatnonzero(wanted)
    host = HostBatch(positions, query_start, contexts.astype(np.int32), slots, tables, logit_rows)
    places, sources = _places_of_unread(requests, unread, row_of_token, positions)
    tensors, (tokens, to, source) = tensors_of(host, device, token_ids, places, sources)
    if unread is not None and places.size:
        # A token below 0 ends its request when the host reads it. Until then the request goes on with token 0.
        tokens[to] = unread.tokens[source].clamp_(min=0)
    batch = Batch(
        token_ids=tokens,
        num_decodes=int((lengths == 1).sum()),
        host=host,
        host_num_drafts=num_drafts if num_drafts.any() else None,
        **tensors,
    )
    scheduled = ScheduledTokens(
        req_ids=[req_ids[i] for i in order],
        rows=rows,
        num_drafts=num_drafts,
        samples=samples,
        first_sample=logit_index[first],
        query_start=query_start,
        logit_rows=logit_rows,
    )
    return batch, scheduled


def tensors_of(
    host: HostBatch, device: torch.device, *more: npt.NDArray[Any]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Copies a batch's arrays to the device, and others with them. Returns the first by their names in `Batch`."""
    count, slots = len(more), len(host.slot_mapping)
    tensors = to_device_together(
        [
            *more,
            host.positions,
            host.query_start,
            host.context_lens,
            host.logit_rows,
            *host.slot_mapping,
            *host.block_tables,
        ],
        device,
    )
    positions, query_start, context_lens, logit_rows, *of_groups = tensors[count:]
    named = {
        "positions": positions,
        "query_start": query_start,
        "context_lens": context_lens,
        "logit_rows": logit_rows,
        "slot_mapping": tuple(of_groups[:slots]),
        "block_tables": tuple(of_groups[slots:]),
    }
    return named, tensors[:count]


def _slots_and_tables(
    requests: RequestRows,
    rows: npt.NDArray[np.int64],
    row_of_token: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    longest: int,
    block_size: int,
) -> tuple[tuple[npt.NDArray[np.int64], ...], tuple[IntArray, ...]]:
    """The slot of each token in each group that attends, and each group's block tables up to the `longest` context."""
    block, offset = positions // block_size, positions % block_size
    attending = requests.num_token_tables
    of_tokens, of_states = requests.tables[:attending], requests.tables[attending:]
    slots = tuple(table[row_of_token, block].astype(np.int64) * block_size + offset for table in of_tokens)
    width = -(-longest // block_size)
    tables = tuple(np.ascontiguousarray(table[rows, :width]) for table in of_tokens)
    return slots, tables + tuple(table[rows] for table in of_states)


def _put_drafts(requests: RequestRows, drafts: dict[str, list[int]], req_ids: list[str]) -> npt.NDArray[np.int64]:
    """Writes drafts after the known tokens, where the next real ones overwrite them. Returns how many each request has."""
    num_drafts = np.zeros(len(req_ids), np.int64)
    for req_id, proposed in drafts.items():
        if proposed:
            row = requests.row(req_id)
            known = int(requests.num_tokens[row])
            requests.tokens[row, known : known + len(proposed)] = proposed
            num_drafts[req_ids.index(req_id)] = len(proposed)
    return num_drafts


def _places_of_unread(
    requests: RequestRows,
    unread: UnreadTokens | None,
    row_of_token: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns which of the batch's tokens the host does not have, and the index of each in `unread`."""
    if unread is None:
        return _NONE, _NONE
    places = np.flatnonzero(positions >= requests.num_tokens[row_of_token])
    where = np.full(len(requests.num_tokens), -1, np.int64)
    where[unread.rows] = np.arange(len(unread.rows))
    sources = where[row_of_token[places]]
    if (sources < 0).any():
        raise InternalError("a step computes a token that was not sampled")
    return places, sources


def _members(rows: npt.NDArray[np.int64], wanted: set[int]) -> list[int]:
    return [index for index, row in enumerate(rows.tolist()) if row in wanted] if wanted else []


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of one request after the other: one each, or with drafts one more than there are drafts."""

    req_ids: list[str]
    rows: npt.NDArray[np.int64]  # indices into RequestRows
    tenancies: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    tokens: HostCopy  # below 0 for a request that can have none
    failed: dict[int, TandemError]  # by row, why a request can have no token
    logprobs: dict[int, ComputedLogprobs]  # by row, for all of the request's sampled tokens


@dataclasses.dataclass(slots=True)
class StepOnDevice:
    """See engine.model.runner.StartedStep."""

    read: Callable[[StepOnDevice], ModelOutput]
    sampled: SampledTokens | None = None
    unread: UnreadTokens | None = None  # the same tokens on the device, for the next step
    # What parts of the runner read from the device when the step is finished.
    unread_parts: list[Callable[[ModelOutput], None]] = dataclasses.field(default_factory=list)
    errors: dict[str, TandemError] = dataclasses.field(default_factory=dict)  # requests that cannot go on
    # The step's end on the device, for a step without tokens to read. Reading tokens waits for the step anyway.
    end: DeviceMark | None = None
    draft_limits: dict[str, int] | None = None  # see SchedulerOutput

    def finish(self) -> ModelOutput:
        return self.read(self)
