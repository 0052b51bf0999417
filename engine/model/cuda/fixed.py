"""Attention of decode steps of one shape, which are recorded once and replayed."""

from __future__ import annotations

from typing import Protocol, cast

import torch

from tandem.engine.model.attention.gathered import GatheredAttention, GatheredCache, GroupReads, PagedStep, Reads
from tandem.engine.model.attention.interface import AttentionStep, PagedAttention
from tandem.engine.model.cuda.decode_inputs import DecodeInputs
from tandem.engine.model.runner import HostBatch


class FixedAttention(Protocol):
    """One shape's."""

    def prepare(self, host: HostBatch | None) -> None:
        """Prepares what a replay needs besides its inputs. Called before each replay, and not recorded. With None all rows are padding."""

    def begin(self) -> AttentionStep:
        """Called while the step is recorded. Everything that it computes must follow from the inputs' tensors on the device."""


class RecordableAttention(Protocol):
    @property
    def reads_tables(self) -> bool:
        """Whether a fixed step reads block tables from its inputs. If so, their width is part of its shape."""

    def fixed(self, inputs: DecodeInputs) -> FixedAttention: ...


def recordable(attention: PagedAttention) -> RecordableAttention:
    if isinstance(attention, GatheredAttention):
        return RecordableGathered(attention)
    return cast("RecordableAttention", attention)


class RecordableGathered:
    reads_tables = True

    def __init__(self, attention: GatheredAttention) -> None:
        self._attention = attention

    def fixed(self, inputs: DecodeInputs) -> FixedGathered:
        return FixedGathered(self._attention, inputs)


class FixedGathered:
    """It computes on the device, at full width, what `GatheredCache.plan_group` decides on the host."""

    def __init__(self, attention: GatheredAttention, inputs: DecodeInputs) -> None:
        self._attention = attention
        self._inputs = inputs

    def prepare(self, host: HostBatch | None) -> None:
        pass

    def begin(self) -> PagedStep:
        kept = self._attention.kept
        groups = range(len(kept.plan.groups))
        return self._attention.step_of([_reads_of(kept, self._inputs, group) for group in groups])


def _reads_of(cache: GatheredCache, inputs: DecodeInputs, group: int) -> GroupReads:
    size, kept, count = cache.plan.block_size, cache.plan.groups[group], inputs.size
    device, contexts = cache.tensor.device, inputs.context_lens
    width = inputs.columns
    if kept.window is not None:
        # A window of w tokens touches at most this many columns, wherever it begins.
        width = min(width, (kept.window + size - 2) // size + 1)
    first_key = kept.first_read(contexts - 1).clamp_(min=0)
    first_column, last_column = first_key // size, (contexts - 1) // size
    columns = first_column[:, None] + torch.arange(width, device=device)
    picked = inputs.block_tables[group].long().gather(1, columns.clamp(max=inputs.columns - 1))
    picked = picked.masked_fill(columns > last_column[:, None], 0)
    position = (first_column * size)[:, None] + torch.arange(width * size, device=device)
    visible = (position >= first_key[:, None]) & (position < contexts[:, None])
    unwritten = torch.arange(size, device=device) >= (contexts - last_column * size)[:, None]
    slots = inputs.slot_mapping[group]
    reads = Reads(
        0,
        count,
        count,
        1,
        cache.rows_of(picked),
        0,
        width * size,
        visible[:, None, None, :],
        False,
        last_column - first_column,
        unwritten[:, None, :, None],
    )
    return GroupReads(slots // size, slots % size, [reads], inputs.padding)
