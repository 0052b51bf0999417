"""Pools a prompt's last hidden states into one vector, chunk by chunk.

A mean is summed over the chunks in float32 on the device. A preemption drops the sum, because the prompt is computed again from its
first token.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.staging import HostCopy
from tandem.wire.pooling import Pooling, PoolingKind


@dataclasses.dataclass(slots=True)
class PoolingPart:
    """The part of one request's vector that has been computed."""

    pooling: Pooling
    tokens: int = 0
    hidden: torch.Tensor | None = None  # the sum of their hidden states, or the one that the pooling picks


@dataclasses.dataclass(frozen=True, slots=True)
class PooledVector:
    """A vector that is being copied to the host."""

    req_id: str
    row: int
    tenancy: int
    vector: HostCopy


@dataclasses.dataclass(frozen=True, slots=True)
class PooledRows:
    """Tokens `first` .. `last` of one request's prompt, in one batch. The pooling needs the hidden states of the rows in `wanted`."""

    row: int  # index into RequestRows
    req_id: str
    first: int
    last: int
    is_whole: bool  # the prompt's last token is among them
    wanted: range  # rows of the batch


class Pooler:
    def __init__(self) -> None:
        self.parts: dict[int, PoolingPart] = {}  # by row, for requests for a vector

    def rows_of(
        self,
        req_ids: list[str],
        rows: npt.NDArray[np.int64],
        query_start: npt.NDArray[np.int32],
        contexts: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int32],
    ) -> list[PooledRows]:
        """The rows of each request for a vector, in the batch's order."""
        found: list[PooledRows] = []
        for index, row in enumerate(rows.tolist()):
            part = self.parts.get(row)
            if part is None:
                continue
            start, end, last = int(query_start[index]), int(query_start[index + 1]), int(contexts[index])
            first = last - (end - start)
            is_whole = last >= int(num_tokens[row])
            match part.pooling.kind:
                case PoolingKind.MEAN:
                    wanted = range(start, end)
                case PoolingKind.LAST:
                    wanted = range(end - 1, end) if is_whole else range(0)
                case PoolingKind.CLS:
                    wanted = range(start, start + 1) if first == 0 else range(0)
            found.append(PooledRows(row, req_ids[index], first, last, is_whole, wanted))
        return found

    def take(
        self, pooled: list[PooledRows], hidden: torch.Tensor, tenancies: npt.NDArray[np.int64]
    ) -> list[PooledVector]:
        """Adds the hidden states of the wanted rows, one request after the other. Returns the vectors that are complete."""
        vectors: list[PooledVector] = []
        begin = 0
        for rows in pooled:
            part = self.parts[rows.row]
            own = hidden[begin : begin + len(rows.wanted)]
            begin += len(rows.wanted)
            self._add(part, rows, own)
            if rows.is_whole:
                copy = HostCopy(_finished(part, rows.req_id))
                vectors.append(PooledVector(rows.req_id, rows.row, int(tenancies[rows.row]), copy))
                part.hidden = None
        return vectors

    def _add(self, part: PoolingPart, rows: PooledRows, own: torch.Tensor) -> None:
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


def read_vector(vector: PooledVector) -> bytes | None:
    """Waits for the vector; returns None if it has NaN or infinity."""
    numbers = vector.vector.read().numpy()
    return numbers.astype("<f4").tobytes() if np.isfinite(numbers).all() else None
