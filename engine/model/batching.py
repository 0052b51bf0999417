"""Makes a step's batch: flattens its requests' rows, cuts it into passes, and tracks the sampled tokens that the host does not have
yet.

A step whose prompts need logits at every position is computed in several passes. A row of logits is as long as the vocabulary,
so the logits of a whole chunk would take more memory than the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.pooler import PooledRows, PooledVector, Pooler
from tandem.engine.model.runner import Batch, HostBatch, LayerHooks
from tandem.engine.model.sampling.logprobs import ComputedLogprobs
from tandem.engine.model.staging import DeviceMark, HostCopy, to_device, to_device_together
from tandem.engine.model.states import RequestRows
from tandem.engine.scheduling.output import ModelOutput
from tandem.wire.errors import InternalError, TandemError

# The most rows of logits in one pass, beyond those that tokens are sampled from.
LOGIT_ROWS = 256
_NONE = np.zeros(0, np.int64)


def cut_for_logits(
    requests: RequestRows, num_scheduled: dict[str, int], every_row: set[int]
) -> list[dict[str, int]]:
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
    pooled: list[PooledRows]  # rows of requests for a vector


def build_batch(
    requests: RequestRows,
    num_scheduled: dict[str, int],
    drafts: dict[str, list[int]],
    wants_prompt_logprobs: set[int],
    block_size: int,
    device: torch.device,
    unread: UnreadTokens | None = None,
    pooler: Pooler | None = None,
) -> tuple[Batch, ScheduledTokens]:
    """Makes the batch of one pass. `wants_prompt_logprobs` are rows of requests whose prompt positions need logits, too.
    `unread` has the tokens after those that the host knows; with it there are no drafts. Rows that `pooler` knows are requests
    for a vector, and sample no token."""
    req_ids = list(num_scheduled)
    rows = requests.rows(req_ids)
    lengths = np.fromiter(num_scheduled.values(), np.int64, len(req_ids))
    num_drafts = np.zeros(len(req_ids), np.int64)
    for req_id, proposed in drafts.items():
        if proposed:
            row = requests.row(req_id)
            known = int(requests.num_tokens[row])
            # Drafts are written after the known tokens, where the next real ones overwrite them.
            requests.tokens[row, known : known + len(proposed)] = proposed
            num_drafts[req_ids.index(req_id)] = len(proposed)
    contexts = requests.num_computed[rows] + lengths
    # Decodes come first, sorted by context length, because attention takes requests of similar length together.
    order = np.lexsort((contexts, lengths > 1))
    rows, lengths, contexts, num_drafts = rows[order], lengths[order], contexts[order], num_drafts[order]

    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    total = int(query_start[-1])
    positions = np.arange(total) - np.repeat(query_start[1:] - contexts, lengths)
    row_of_token = np.repeat(rows, lengths)
    token_ids = requests.tokens[row_of_token, positions].astype(np.int64)
    block, offset = positions // block_size, positions % block_size
    of_tokens, of_states = (
        requests.tables[: requests.num_token_tables],
        requests.tables[requests.num_token_tables :],
    )
    slots = tuple(table[row_of_token, block].astype(np.int64) * block_size + offset for table in of_tokens)
    width = -(-int(contexts.max()) // block_size)
    tables = tuple(np.ascontiguousarray(table[rows, :width]) for table in of_tokens)
    tables += tuple(table[rows] for table in of_states)

    samples = contexts - num_drafts >= requests.num_tokens[rows]
    names = [req_ids[i] for i in order]
    pooled: list[PooledRows] = []
    hidden_rows: torch.Tensor | None = None
    if pooler is not None:
        pooled = pooler.rows_of(names, rows, query_start, contexts, requests.num_tokens)
        samples &= ~np.isin(rows, [one.row for one in pooled])
        kept = [row for one in pooled for row in one.wanted]
        hidden_rows = to_device(np.array(kept, np.int64), device) if kept else None
    wanted = np.zeros(total, np.bool_)
    sampled = np.flatnonzero(samples)
    first = query_start[1:] - 1 - num_drafts
    wanted[first[sampled]] = True
    for index in np.flatnonzero(num_drafts * samples).tolist():
        wanted[first[index] : query_start[index + 1]] = True
    for index in _members(rows, wants_prompt_logprobs):
        start, end = query_start[index], query_start[index + 1]
        predicts_prompt = positions[start:end] + 1 < requests.num_prompt_tokens[rows[index]]
        wanted[start:end] |= predicts_prompt
    logit_index = np.cumsum(wanted) - 1

    logit_rows = np.flatnonzero(wanted)
    host = HostBatch(positions, query_start, contexts.astype(np.int32), slots, tables, logit_rows)
    groups = len(slots)
    places, sources = _places_of_unread(requests, unread, row_of_token, positions)
    *tensors, to, source = to_device_together(
        [token_ids, positions, query_start, host.context_lens, logit_rows, *slots, *tables, places, sources],
        device,
    )
    if unread is not None and places.size:
        # A token below 0 ends its request when the host reads it. Until then the request goes on with token 0.
        tensors[0][to] = unread.tokens[source].clamp_(min=0)
    batch = Batch(
        token_ids=tensors[0],
        positions=tensors[1],
        query_start=tensors[2],
        context_lens=tensors[3],
        logit_rows=tensors[4],
        slot_mapping=tuple(tensors[5 : 5 + groups]),
        block_tables=tuple(tensors[5 + groups :]),
        num_decodes=int((lengths == 1).sum()),
        max_context_len=int(contexts.max()),
        host_query_start=query_start,
        host_context_lens=host.context_lens,
        host_num_drafts=num_drafts if num_drafts.any() else None,
        hidden_rows=hidden_rows,
        host=host,
    )
    scheduled = ScheduledTokens(
        req_ids=names,
        rows=rows,
        num_drafts=num_drafts,
        samples=samples,
        first_sample=logit_index[first],
        query_start=query_start,
        logit_rows=logit_rows,
        pooled=pooled,
    )
    return batch, scheduled


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


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPiece:
    """Log-probabilities of some tokens of a prompt."""

    req_id: str
    first: int  # the first of those tokens
    num_prompt: int
    is_last: bool
    logprobs: ComputedLogprobs | None  # None for a piece with only the prompt's first token, which has none


@dataclasses.dataclass(slots=True)
class StepOnDevice:
    """See engine.model.runner.StartedStep."""

    read: Callable[[StepOnDevice], ModelOutput]
    sampled: SampledTokens | None = None
    unread: UnreadTokens | None = None  # the same tokens on the device, for the next step
    pieces: list[PromptPiece] = dataclasses.field(default_factory=list)
    vectors: list[PooledVector] = dataclasses.field(default_factory=list)
    errors: dict[str, TandemError] = dataclasses.field(default_factory=dict)  # requests that cannot go on
    # The step's end on the device, for a step without tokens to read. Reading tokens waits for the step anyway.
    end: DeviceMark | None = None
    draft_limits: dict[str, int] | None = None  # see SchedulerOutput

    def finish(self) -> ModelOutput:
        return self.read(self)
