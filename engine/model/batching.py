"""From the requests' rows to one flattened batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from engine.model.batch import Batch, HostBatch
from engine.model.staging import to_device_together
from engine.model.states import RequestRows


@dataclasses.dataclass(slots=True)
class Scheduled:
    """What a step computes, as arrays in batch order."""

    req_ids: list[str]
    rows: npt.NDArray[np.int64]  # of RequestRows
    num_drafts: npt.NDArray[np.int64]  # the last so many of the scheduled tokens are proposals
    samples: npt.NDArray[np.bool_]  # the request's newest token is in this step, so another follows it
    first_sample: npt.NDArray[np.int64]  # where its logits begin among the batch's; it has num_drafts + 1
    query_start: npt.NDArray[np.int32]


def build_batch(
    requests: RequestRows,
    num_scheduled: dict[str, int],
    drafts: dict[str, list[int]],
    wants_prompt_logprobs: set[int],
    block_size: int,
    device: torch.device,
) -> tuple[Batch, Scheduled]:
    """`wants_prompt_logprobs` are rows of requests whose prompt positions need logits, too."""
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
    slots = tuple(
        table[row_of_token, block].astype(np.int64) * block_size + offset for table in requests.tables
    )
    width = -(-int(contexts.max()) // block_size)
    tables = tuple(np.ascontiguousarray(table[rows, :width]) for table in requests.tables)

    samples = contexts - num_drafts >= requests.num_tokens[rows]
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

    host = HostBatch(token_ids, positions, query_start, contexts.astype(np.int32), slots, tables)
    groups = len(slots)
    tensors = to_device_together(
        [token_ids, positions, query_start, host.context_lens, np.flatnonzero(wanted), *slots, *tables],
        device,
    )
    batch = Batch(
        token_ids=tensors[0],
        positions=tensors[1],
        query_start=tensors[2],
        context_lens=tensors[3],
        logit_rows=tensors[4],
        slot_mapping=tuple(tensors[5 : 5 + groups]),
        block_tables=tuple(tensors[5 + groups :]),
        num_decodes=int((lengths == 1).sum()),
        max_query_len=int(lengths.max()),
        max_context_len=int(contexts.max()),
        host_query_start=query_start,
        host_context_lens=host.context_lens,
        host=host,
    )
    scheduled = Scheduled(
        req_ids=[req_ids[i] for i in order],
        rows=rows,
        num_drafts=num_drafts,
        samples=samples,
        first_sample=logit_index[first],
        query_start=query_start,
    )
    return batch, scheduled


def _members(rows: npt.NDArray[np.int64], wanted: set[int]) -> list[int]:
    return [index for index, row in enumerate(rows.tolist()) if row in wanted] if wanted else []
