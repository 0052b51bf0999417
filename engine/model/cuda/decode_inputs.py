"""The shapes that steps are recorded in, and the buffers that a recorded step reads its inputs from."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engine.model.runner import HostBatch
from tandem.engine.model.staging import to_device_together

_FEWEST_COLUMNS = 8


def token_buckets(most: int) -> list[int]:
    """Numbers of tokens up to `most`: closer to each other where one more row costs relatively more."""
    buckets = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return [*(bucket for bucket in buckets if bucket < most), most]


def bucket_of(buckets: list[int], count: int) -> int | None:
    """The smallest bucket that `count` fits into; None if there is none."""
    return next((bucket for bucket in buckets if bucket >= count), None)


def table_width(columns: int) -> int:
    """A block table's width in a recorded step: the next power of two."""
    return max(_FEWEST_COLUMNS, 1 << max(0, columns - 1).bit_length())


class DecodeInputs:
    """Input tensors at fixed addresses, for `size` requests of one token each.

    Rows beyond a step's requests are padding: token 0 at position 0 with a context of one token, whose KV is in the null block.
    Zeros are written there instead of its KV. Padding's results are never used, but they are computed together with real rows,
    so they must be numbers.
    """

    def __init__(self, size: int, columns: int, num_groups: int, block_size: int, device: torch.device) -> None:
        self.size = size
        self.columns = columns  # the width of the block tables; 0 without them
        self.num_groups = num_groups
        self._block_size = block_size
        self._numbers = torch.zeros(3 + num_groups, size, dtype=torch.int64, device=device)
        self._tables = torch.zeros(num_groups, size, columns, dtype=torch.int32, device=device)
        self.load(None)

    @property
    def token_ids(self) -> torch.Tensor:
        return self._numbers[0]

    @property
    def positions(self) -> torch.Tensor:
        return self._numbers[1]

    @property
    def context_lens(self) -> torch.Tensor:
        """int64 [size]"""
        return self._numbers[2]

    @property
    def slot_mapping(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._numbers[3:])

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._tables)

    @property
    def padding(self) -> torch.Tensor:
        """bool [size]: the rows that write to the null block. Computing it is part of a recording."""
        return self._numbers[3] < self._block_size

    def load(self, host: HostBatch | None, token_ids: torch.Tensor | None = None) -> None:
        """Loads the next replay's inputs: requests of one token each, and their token ids on the device. With None every row is
        padding."""
        numbers = np.zeros(self._numbers.shape, np.int64)
        numbers[2] = 1
        tables = np.zeros(self._tables.shape, np.int32)
        if host is not None:
            count = len(host.positions)
            numbers[1, :count] = host.positions
            numbers[2, :count] = host.context_lens
            for group in range(self.num_groups):
                numbers[3 + group, :count] = host.slot_mapping[group]
                width = min(self.columns, host.block_tables[group].shape[1])
                tables[group, :count, :width] = host.block_tables[group][:, :width]
        staged = to_device_together([numbers, tables], self._numbers.device)
        self._numbers.copy_(staged[0], non_blocking=True)
        self._tables.copy_(staged[1], non_blocking=True)
        if token_ids is not None:
            self.token_ids[: token_ids.shape[0]] = token_ids


def as_rows(host: HostBatch) -> HostBatch:
    """The same batch with each token as a request of its own. A layer writes all the step's keys and values before it reads any, so
    a token also finds those of the step's earlier tokens in the cache."""
    counts = np.diff(host.query_start)
    if (counts == 1).all():
        return host
    return HostBatch(
        positions=host.positions,
        query_start=np.arange(len(host.positions) + 1, dtype=np.int32),
        context_lens=(host.positions + 1).astype(np.int32),
        slot_mapping=host.slot_mapping,
        block_tables=tuple(np.repeat(table, counts, axis=0) for table in host.block_tables),
        logit_rows=host.logit_rows,
    )
