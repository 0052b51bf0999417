"""Which rank computes which rows of a step.

A row attends to all rows before it, so the last rows of a prompt cost most. A chunk of N ranks is cut into 2N pieces, and each rank gets
one from the front and the one as far from the end. Rank 0 samples, so it gets the rows whose logits are asked for, and those after them:
decodes, drafts, the ends of prompts. It gets the fewer rows of the chunks.

Every rank divides each step by itself, and all must find the same: so by integers, from what all of them are told.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.base.errors import InternalError
from tandem.engine.model.batching import tensors_of
from tandem.engine.model.runner import Batch, HostBatch

# A piece has at least this many rows: with fewer, exchanging keys and values costs more than computing the rows.
LEAST_ROWS = 8


class Run(NamedTuple):
    """Consecutive rows of one request."""

    request: int
    start: int
    end: int


def divide(batch: Batch, ranks: int) -> list[list[Run]] | None:
    """Returns each rank's runs, in the batch's order; every rank has some. None: no chunk is long enough."""
    host = batch.host
    starts = host.query_start[:-1].astype(np.int64)
    ends, asked = host.query_start[1:].astype(np.int64), host.logit_rows
    first_asked = np.append(asked, batch.num_tokens)[np.searchsorted(asked, starts)]
    free = np.minimum(first_asked, ends) - starts  # rows that any rank may compute
    free[free < 2 * ranks * LEAST_ROWS] = 0
    total = int(free.sum())
    if not total:
        return None
    # Rank 0's share of `total`: with its other rows it has as many as each other rank.
    lead = max(0, batch.num_tokens // ranks - (batch.num_tokens - total))
    shares = [lead * (ranks - 1), *[total - lead] * (ranks - 1)]
    pieces = [*range(ranks), *reversed(range(ranks))]
    until = np.cumsum([shares[rank] for rank in pieces])
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    for request, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        count = int(free[request])
        if not count:
            runs[0].append(Run(request, start, end))
            continue
        bounds = (count * until // until[-1]).tolist()
        if bounds[0] < LEAST_ROWS:
            bounds[0] = 0
        bounds[-2] = min(bounds[-2], count - LEAST_ROWS)
        bounds[-1] = end - start
        before = 0
        for rank, bound in zip(pieces, bounds, strict=True):
            if bound == before:
                continue
            own, first = runs[rank], start + before
            if own and (own[-1].request, own[-1].end) == (request, first):  # the middle ones are neighbours
                first = own.pop().start
            own.append(Run(request, first, start + bound))
            before = bound
    return runs


def rows_of(runs: list[Run]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(run.start, run.end) for run in runs])


def part_of(batch: Batch, runs: list[Run]) -> Batch:
    """The batch of these rows. A run is a request to it: the two of one prompt have the same blocks, and end at different tokens."""
    host = batch.host
    if batch.hidden_rows is not None:
        raise InternalError("a batch of which hidden states are asked for cannot be divided")
    rows, requests = rows_of(runs), [run.request for run in runs]
    query_start = np.cumsum([0, *(run.end - run.start for run in runs)], dtype=np.int32)
    positions = host.positions[rows]
    contexts = (positions[query_start[1:] - 1] + 1).astype(np.int32)
    slots = tuple(each[rows] for each in host.slot_mapping)
    tables = tuple(np.ascontiguousarray(each[requests]) for each in host.block_tables)
    logit_rows = np.flatnonzero(np.isin(rows, host.logit_rows))
    part = HostBatch(positions, query_start, contexts, slots, tables, logit_rows)
    tensors, (at,) = tensors_of(part, batch.token_ids.device, rows)
    return dataclasses.replace(
        batch,
        token_ids=batch.token_ids[at],
        num_decodes=sum(request < batch.num_decodes for request in requests),
        host=part,
        host_num_drafts=None,
        **tensors,
    )
