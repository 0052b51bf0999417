"""Pools a prompt's last hidden states into one vector, chunk by chunk.

A mean is summed over the chunks in float32 on the device. A preemption drops the sum, because the prompt is computed again from its
first token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from tandem.base.errors import InternalError, InvalidLogits
from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Batch, Forward
from tandem.engine.model.staging import HostCopy, to_device
from tandem.engine.scheduling.output import ModelOutput
from tandem.wire.pooling import Pooling, PoolingKind


@dataclasses.dataclass(slots=True)
class PoolingPart:
    """The part of one request's vector that has been computed."""

    pooling: Pooling
    tokens: int = 0
    hidden: torch.Tensor | None = None  # the sum of their hidden states, or the one that the pooling picks


@dataclasses.dataclass(frozen=True, slots=True)
class _PooledRows:
    """Tokens `first` .. `last` of one request's prompt, in one batch. The pooling needs the hidden states of the rows in `wanted`."""

    row: int  # index into RequestRows
    req_id: str
    first: int
    last: int
    is_whole: bool  # the prompt's last token is among them
    wanted: range  # rows of the batch


class Pooler(RunnerPart):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: dict[int, PoolingPart] = {}  # by row, for requests for a vector
        self._pooled: list[_PooledRows] = []  # of the batch that is computed
        self._no_hidden = torch.empty(0, 0, device=device)

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        if asked.facts.pooling is not None:
            self._parts[row] = PoolingPart(asked.facts.pooling)
            requests.silent.add(row)

    def clear(self, row: int) -> None:
        self._parts.pop(row, None)

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        if not self._parts:
            return batch
        self._pooled = list(self._rows_of(batch, scheduled, requests))
        kept = [row for one in self._pooled for row in one.wanted]
        if not kept:
            return batch
        return dataclasses.replace(batch, hidden_rows=to_device(np.array(kept, np.int64), self._device))

    def _rows_of(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows) -> Iterator[_PooledRows]:
        """The rows of each request for a vector, in the batch's order."""
        for index, row in enumerate(scheduled.rows.tolist()):
            part = self._parts.get(row)
            if part is None:
                continue
            start, end = int(scheduled.query_start[index]), int(scheduled.query_start[index + 1])
            last = int(batch.host_context_lens[index])
            first = last - (end - start)
            is_whole = last >= int(requests.num_tokens[row])
            match part.pooling.kind:
                case PoolingKind.MEAN:
                    wanted = range(start, end)
                case PoolingKind.LAST:
                    wanted = range(end - 1, end) if is_whole else range(0)
                case PoolingKind.CLS:
                    wanted = range(start, start + 1) if first == 0 else range(0)
            yield _PooledRows(row, scheduled.req_ids[index], first, last, is_whole, wanted)

    def computed(
        self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice, forward: Forward
    ) -> None:
        """Adds the hidden states of the wanted rows, one request after the other."""
        if not self._pooled:
            return
        # A chunk may have no hidden rows: with pooling of the last token, only the last chunk has one.
        hidden = forward.hidden if batch.hidden_rows is not None else self._no_hidden
        begin = 0
        for rows in self._pooled:
            part = self._parts[rows.row]
            own = hidden[begin : begin + len(rows.wanted)]
            begin += len(rows.wanted)
            self._add(part, rows, own)
            if rows.is_whole:
                copy = HostCopy(_finished(part, rows.req_id))
                tenancy = int(requests.tenancies[rows.row])
                started.unread_parts.append(partial(_read, rows, tenancy, copy, requests))
                part.hidden = None
        self._pooled = []

    def _add(self, part: PoolingPart, rows: _PooledRows, own: torch.Tensor) -> None:
        if rows.first == 0:
            part.tokens, part.hidden = 0, None
        if part.pooling.kind is not PoolingKind.LAST and rows.first != part.tokens:
            raise InternalError(
                f"the vector of {rows.req_id} has {part.tokens} of its tokens, and goes on at {rows.first}"
            )
        part.tokens = rows.last
        if not len(own):
            return
        if part.pooling.kind is PoolingKind.MEAN:
            total = own.sum(dim=0, dtype=torch.float32)
            part.hidden = total if part.hidden is None else part.hidden + total
        else:
            part.hidden = own[0].float()


def _finished(part: PoolingPart, req_id: str) -> torch.Tensor:
    vector = part.hidden
    if vector is None:
        raise InternalError(f"the vector of {req_id} lacks its token")
    if part.pooling.kind is PoolingKind.MEAN:
        vector = vector / part.tokens
    if part.pooling.dimensions is not None:
        vector = vector[: part.pooling.dimensions]
    if part.pooling.normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    return vector.contiguous()


def _read(rows: _PooledRows, tenancy: int, copy: HostCopy, requests: RequestRows, output: ModelOutput) -> None:
    """Waits for the vector. A request that left its row since then has no use for it."""
    numbers = copy.read().numpy()
    if requests.tenancies[rows.row] != tenancy:
        return
    if np.isfinite(numbers).all():
        output.vectors[rows.req_id] = numbers.astype("<f4").tobytes()
    else:
        output.errors[rows.req_id] = InvalidLogits(
            "the model's output is no number: a part of the vector is infinite or undefined"
        )
