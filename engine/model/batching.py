"""A step on its way to the device: its requests' rows as one flattened batch, the passes that the batch is computed in, and what of it
the host does not know yet.

A step whose prompts want logits at every position is cut into several: a row of logits is as long as the vocabulary, and a whole chunk of
such rows would take more memory than the model.
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

# Rows of logits in one pass, beyond those that are sampled from.
LOGIT_ROWS = 256
_NONE = np.zeros(0, np.int64)


def cut_for_logits(
    requests: RequestRows, num_scheduled: dict[str, int], every_row: set[int]
) -> list[dict[str, int]]:
    """How many tokens of whom each pass computes. `every_row` are rows of requests whose tokens all want logits.

    What those have too much goes first, piece by piece; everything else, and the last token of every request, is in the last
    pass. That a prompt's chunk is cut anywhere changes nothing about its result.
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
    """Layers are waited for before the first pass reads them."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def wait_for_layer_load(self, layer: int) -> None:
        self._hooks.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        pass


class _Saves:
    """A layer of the step is written when the last pass has written it."""

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
    """Tokens that a step has sampled and the host does not know yet."""

    rows: npt.NDArray[np.int64]  # whose they are; each once
    tokens: torch.Tensor  # int64, on the device; below 0 where there could be none


@dataclasses.dataclass(slots=True)
class ScheduledTokens:
    """What a step computes, as arrays in batch order."""

    req_ids: list[str]
    rows: npt.NDArray[np.int64]  # of RequestRows
    num_drafts: npt.NDArray[np.int64]  # the last so many of the scheduled tokens are proposals
    samples: npt.NDArray[np.bool_]  # the request's newest token is in this step, so another follows it
    first_sample: npt.NDArray[np.int64]  # where its logits begin among the batch's; it has num_drafts + 1
    query_start: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]  # the batch's, in host memory
    pooled: list[PooledRows]  # of requests that want a vector


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
    """`wants_prompt_logprobs` are rows of requests whose prompt positions need logits, too. With `unread` tokens there
    are no drafts, and whatever follows the known tokens is one of those. Rows that `pooler` knows end in a vector, and none
    of their tokens is sampled."""
    req_ids = list(num_scheduled)
    rows = requests.rows(req_ids)
    lengths = np.fromiter(num_scheduled.values(), np.int64, len(req_ids))
    num_drafts = np.zeros(len(req_ids), np.int64)
    for req_id, proposed in drafts.items():
        if proposed:
            row = requests.row(req_id)
            known = int(requests.num_tokens[row])
            # Behind the known tokens, where the next real ones overwrite them.
            requests.tokens[row, known : known + len(proposed)] = proposed
            num_drafts[req_ids.index(req_id)] = len(proposed)
    contexts = requests.num_computed[rows] + lengths
    # Single tokens first, and among them by length, because what is alike is attended together.
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
        # A request without a token ends when it is read. Until then it goes on with any.
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
    """Which of the batch's tokens the host does not know, and where among the unread each is."""
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
    """Tokens of one request after the other: of each its next, or with drafts its next few."""

    req_ids: list[str]
    rows: npt.NDArray[np.int64]  # of RequestRows
    tenancies: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    tokens: HostCopy  # below 0 where there could be none
    failed: dict[int, TandemError]  # rows that can have none, and why
    logprobs: dict[int, ComputedLogprobs]  # of rows that want them, for all their tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPiece:
    """Log-probabilities of some tokens of a prompt."""

    req_id: str
    first: int  # the first of those tokens
    num_prompt: int
    is_last: bool
    logprobs: ComputedLogprobs | None  # None where the piece has none but the prompt's first token


@dataclasses.dataclass(slots=True)
class StepOnDevice:
    """See engine.model.runner.StartedStep."""

    read: Callable[[StepOnDevice], ModelOutput]
    sampled: SampledTokens | None = None
    unread: UnreadTokens | None = None  # the same tokens, for the next step
    pieces: list[PromptPiece] = dataclasses.field(default_factory=list)
    vectors: list[PooledVector] = dataclasses.field(default_factory=list)
    errors: dict[str, TandemError] = dataclasses.field(
        default_factory=dict
    )  # requests that were computed in vain
    # Where the step ends on the device, if reading its tokens does not wait for that: it has none to read.
    end: DeviceMark | None = None
    draft_limits: dict[str, int] | None = None  # see SchedulerOutput

    def finish(self) -> ModelOutput:
        return self.read(self)
