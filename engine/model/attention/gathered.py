"""Paged attention by gathering: copies a request's blocks together, and attends to them as one sequence of keys.

It runs on any device and serves every kind of layer that this engine knows. Indices and masks depend only on the step, so they are
computed once per step and KV cache group, not once per layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.model.attention.interface import AttentionCall
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.attention.layers import CachePlan
from tandem.engine.model.pieces import to_fp8, turned
from tandem.engine.model.runner import Batch
from tandem.engine.model.staging import to_device

# A prompt's chunk is attended in tiles of rows, so that each tile reads only the keys up to its own last position.
_TILE_ROWS = 512


@dataclasses.dataclass(slots=True)
class Reads:
    """Rows [start, end) of the batch, and the keys that they read."""

    start: int
    end: int
    num_requests: int
    rows_each: int
    # [requests, KV heads, columns]: rows of the flat cache, for slot 0's keys. None: the rows read only their own keys, so nothing is
    # gathered.
    blocks: torch.Tensor | None
    first_key: int  # the first of the gathered keys to use ...
    num_keys: int  # ... and how many
    mask: torch.Tensor | None
    causal: bool
    # For batched decodes: each request's last column, and the offsets in it that the request has not written.
    last_column: torch.Tensor | None = None
    unwritten: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class GroupReads:
    block: torch.Tensor  # [T]
    offset: torch.Tensor  # [T]
    reads: list[Reads]
    padding: torch.Tensor | None = None  # [T]: tokens of which zeros are written, to the null block


class GatheredAttention:
    """See engine.model.attention.interface.PagedAttention."""

    def __init__(self, tensor: torch.Tensor, plan: CachePlan) -> None:
        self.kept = GatheredCache(tensor, plan)

    def begin(self, batch: Batch) -> PagedStep:
        groups = range(len(self.kept.plan.groups))
        return self.step_of([self.kept.plan_group(batch, group) for group in groups])

    def step_of(self, groups: list[GroupReads]) -> PagedStep:
        return PagedStep(self.kept, groups)


class PagedStep:
    """One step's attention. `attend` is called once per layer, in order."""

    def __init__(self, kept: GatheredCache, groups: list[GroupReads]) -> None:
        self._kept = kept
        self._groups = groups

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [query heads, T, D]
        key: torch.Tensor,  # [KV heads, T, D]
        value: torch.Tensor,  # [KV heads, T, DV]
        how: AttentionCall,
    ) -> torch.Tensor:
        """See AttentionStep.attend."""
        if (rotary := how.rotary) is not None:
            query, key = turned(query, rotary, rotary.query_norm), turned(key, rotary, rotary.key_norm)
        group = self._groups[self._kept.plan.group_of_layer[layer]]
        if group.padding is not None:
            pads = group.padding[None, :, None]
            key, value = key.masked_fill(pads, 0), value.masked_fill(pads, 0)
        key, value = self._kept.as_kept(key), self._kept.as_kept(value)
        if layer not in self._kept.plan.readers:
            self._kept.write(layer, group.block, group.offset, key, value)
        heads, tokens, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        for reads in group.reads:
            rows = slice(reads.start, reads.end)
            keys, values = self._keys_and_values(layer, reads, key, value)
            # [requests, heads, rows each, D]
            asked = query[:, rows].reshape(heads, reads.num_requests, reads.rows_each, -1).transpose(0, 1)
            seen = attend(
                asked,
                keys,
                values,
                mask=reads.mask,
                causal=reads.causal,
                scale=how.scale,
                softcap=how.softcap,
                sinks=how.sinks,
            )
            out[rows].view(reads.num_requests, reads.rows_each, heads, -1).copy_(seen.transpose(1, 2))
        return out

    def _keys_and_values(
        self, layer: int, reads: Reads, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if reads.blocks is None:
            own = slice(reads.end - reads.num_keys, reads.end)
            return key[:, own].unsqueeze(0), value[:, own].unsqueeze(0)
        return (self._kept.read(layer, 0, reads, key), self._kept.read(layer, 1, reads, value))


class GatheredCache:
    """The KV cache tensor, written by slot and read by block."""

    def __init__(self, tensor: torch.Tensor, plan: CachePlan) -> None:
        self.tensor = tensor
        self.plan = plan
        # One row per (block, slot, part, head), with block_size * head_dim elements.
        self._flat = tensor.view(-1, plan.block_size, plan.head_dim)
        self._rows_per_block = plan.slots * plan.num_parts * plan.num_kv_heads
        self._heads = torch.arange(plan.num_kv_heads, device=tensor.device).view(1, -1, 1)

    def as_kept(self, states: torch.Tensor) -> torch.Tensor:
        """Rounds keys or values to the cache's dtype. A chunk's own keys are rounded as the cached ones are, so that a result does not
        depend on how a prompt is cut."""
        return states if states.dtype == self.tensor.dtype else to_fp8(states).to(states.dtype)

    def write(
        self,
        layer: int,
        block: torch.Tensor,
        offset: torch.Tensor,
        *parts: torch.Tensor,
        first: int = 0,
        begin: int = 0,
    ) -> None:
        """Writes keys and values, or latents, [heads, T, dim] each. `first` is the block's part of the first tensor, `begin` its place in
        a head's row."""
        slot, head = self.plan.slot_of_layer[layer], self.plan.first_head_of_layer[layer]
        for part, states in enumerate(parts, first):
            heads, _, dim = states.shape
            target = self.tensor[:, slot, part, head : head + heads, :, begin : begin + dim]
            # Indices on both sides of a slice put the indexed dimension first: [T, heads, dim].
            target[block, :, offset] = states.transpose(0, 1).to(target.dtype)

    def read(self, layer: int, part: int, reads: Reads, like: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """[requests, heads, keys, dim]"""
        assert reads.blocks is not None
        plan = self.plan
        heads, dim = like.shape[0], like.shape[-1]
        head = plan.first_head_of_layer[layer]
        rows = (
            reads.blocks[:, head : head + heads]
            + (plan.slot_of_layer[layer] * plan.num_parts + part) * plan.num_kv_heads
        )
        gathered = self._flat.index_select(0, rows.reshape(-1)).to(like.dtype)
        gathered = gathered.view(rows.shape[0], heads, rows.shape[2], plan.block_size, plan.head_dim)
        if reads.last_column is not None and reads.unwritten is not None:
            # Slots that were never written may hold anything, even NaN, which a mask does not remove: 0 * NaN is NaN.
            each = torch.arange(rows.shape[0], device=rows.device)
            last = gathered[each, :, reads.last_column]
            gathered[each, :, reads.last_column] = last.masked_fill_(reads.unwritten, 0)
        keys = gathered.view(rows.shape[0], heads, -1, plan.head_dim)
        return keys[:, :, reads.first_key : reads.first_key + reads.num_keys, begin : begin + dim]

    def plan_group(self, batch: Batch, group: int, *, decodes: bool = True) -> GroupReads:
        slots = batch.slot_mapping[group]
        size = self.plan.block_size
        reads = self._decode_reads(batch, group) if decodes else []
        for request in range(batch.num_decodes, batch.num_requests):
            reads.extend(self._chunk_reads(batch, group, request))
        return GroupReads(slots // size, slots % size, reads)

    def _decode_reads(self, batch: Batch, group: int) -> list[Reads]:
        """Takes decodes of similar length together, so that little is gathered in vain."""
        contexts = batch.host_context_lens[: batch.num_decodes]
        reads = []
        start = 0
        while start < batch.num_decodes:
            longer = np.flatnonzero(contexts[start:] > 2 * contexts[start] + 4 * self.plan.block_size)
            end = start + int(longer[0]) if longer.size else batch.num_decodes
            reads.append(self._decode_run(batch, group, start, end))
            start = end
        return reads

    def _decode_run(self, batch: Batch, group: int, start: int, end: int) -> Reads:
        contexts = batch.host_context_lens[start:end].astype(np.int64)
        first_key = np.maximum(0, self.plan.groups[group].first_read(contexts - 1))
        return self.reads_between(batch.block_tables[group][start:end], start, end, first_key, contexts)

    def reads_between(
        self,
        table: torch.Tensor,  # [requests, columns]
        start: int,
        end: int,
        first_key: npt.NDArray[np.int64],
        end_key: npt.NDArray[np.int64],
    ) -> Reads:
        """Rows [start, end) are one of each request, and read its keys from `first_key` on, before `end_key`."""
        size = self.plan.block_size
        device = self.tensor.device
        first_column = first_key // size
        last_column = (end_key - 1) // size
        if end - start == 1:
            blocks = self.rows_of(table[:, first_column[0] : last_column[0] + 1])
            skip = int(first_key[0] - first_column[0] * size)
            return Reads(start, end, 1, 1, blocks, skip, int(end_key[0] - first_key[0]), None, False)
        width = int((last_column - first_column).max()) + 1
        columns = first_column[:, None] + np.arange(width)
        # Columns beyond a request's last one read the null block, and are masked.
        picked = to_device(np.minimum(columns, last_column[:, None]), device)
        table = torch.gather(table.long(), 1, picked)
        table.masked_fill_(to_device(columns > last_column[:, None], device), 0)
        position = (first_column * size)[:, None] + np.arange(width * size)
        visible = (position >= first_key[:, None]) & (position < end_key[:, None])
        mask = None if visible.all() else to_device(visible, device)[:, None, None, :]
        tail = np.arange(size)[None, :] >= (end_key - last_column * size)[:, None]
        return Reads(
            start,
            end,
            end - start,
            1,
            self.rows_of(table),
            0,
            width * size,
            mask,
            False,
            to_device(last_column - first_column, device),
            to_device(tail, device)[:, None, :, None],
        )

    def _chunk_reads(self, batch: Batch, group: int, request: int) -> list[Reads]:
        kept = self.plan.groups[group]
        row_start, row_end = (int(n) for n in batch.host_query_start[request : request + 2])
        context = int(batch.host_context_lens[request])
        rows = row_end - row_start
        if rows == context and (kept.window is None or rows <= kept.window):
            return [Reads(row_start, row_end, 1, rows, None, 0, rows, None, True)]
        reads = []
        for start in range(row_start, row_end, _TILE_ROWS):
            end = min(start + _TILE_ROWS, row_end)
            first, last = context - (row_end - start), context - (row_end - end) - 1
            oldest = max(0, kept.first_read(first))
            mask = self._band(first, last, oldest, kept)
            num_keys = last + 1 - oldest
            if rows == context:
                reads.append(Reads(start, end, 1, end - start, None, 0, num_keys, mask, False))
                continue
            size = self.plan.block_size
            table = batch.block_tables[group][request : request + 1, oldest // size : last // size + 1]
            reads.append(Reads(start, end, 1, end - start, self.rows_of(table), oldest % size, num_keys, mask, False))
        return reads

    def reads_of_all(self, batch: Batch, group: int, request: int) -> tuple[Reads, torch.Tensor]:
        """The reads of all a request's rows together, and the mask of the keys that each row may see."""
        start, end = (int(n) for n in batch.host_query_start[request : request + 2])
        context, kept, size = (int(batch.host_context_lens[request]), self.plan.groups[group], self.plan.block_size)
        first = context - (end - start)
        oldest = max(0, kept.first_read(first))
        table = batch.block_tables[group][request : request + 1, oldest // size : (context - 1) // size + 1]
        reads = Reads(start, end, 1, end - start, self.rows_of(table), oldest % size, context - oldest, None, False)
        return reads, self._band(first, context - 1, oldest, kept)

    def _band(self, first: int, last: int, oldest: int, kept: KVCacheGroup) -> torch.Tensor:
        """The mask of the keys oldest..last that each position first..last may see."""
        asks = torch.arange(first, last + 1, device=self.tensor.device)[:, None]
        keys = torch.arange(oldest, last + 1, device=self.tensor.device)[None, :]
        seen = keys <= asks
        if kept.window is not None:
            seen &= keys >= kept.first_read(asks)
        return seen

    def rows_of(self, table: torch.Tensor) -> torch.Tensor:
        return table.long()[:, None, :] * self._rows_per_block + self._heads
