"""How each rank gets the keys and values of rows that others compute, layer by layer.

Ranks that map one cache write their own, and wait for all others before they read. Ranks with caches of their own gather them, and each
writes all. A step that is not divided is rank 0's (with tensor parallel: its group's); other caches get what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.attention.gathered import GatheredCache
from tandem.engine.model.attention.interface import AttentionCall, AttentionStep, PagedAttention
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.pieces import turned
from tandem.engine.model.runner import Batch
from tandem.engine.model.shard import Collectives, Shard
from tandem.engine.model.staging import to_device


class KVExchange:
    def __init__(
        self,
        shard: Shard,
        kv_cache: torch.Tensor,
        plan: CachePlan,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: the model's."""
        self._kept = GatheredCache(kv_cache, plan)
        self._among: Collectives = shard.across or shard.collectives
        self._all = shard.collectives
        self.maps_one_cache = shard.kv_memory is not None
        self._writers = [layer for layer in layers if layer.index not in plan.readers]
        self._dtype = dtype
        self._counts: list[int] | None = None
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each group: blocks, offsets

    @property
    def is_idle(self) -> bool:
        """No keys and values are exchanged in this step."""
        return self._counts is None and self.maps_one_cache

    def begin(self, batch: Batch, rows: Sequence[npt.NDArray[np.int64]] | None, context: int) -> None:
        """Begins a step. `rows`: those of each context; None: all are context 0's."""
        self._counts = None if rows is None else [len(own) for own in rows]
        if self.is_idle:
            return
        slots: Sequence[torch.Tensor] = batch.slot_mapping
        if rows is not None:
            written = rows[context] if self.maps_one_cache else np.concatenate(rows)
            index = to_device(written, batch.token_ids.device)
            slots = [each[index] for each in slots]
        size = self._kept.plan.block_size
        self._places = [(each // size, each % size) for each in slots]

    def give(self, layer: int, parts: Sequence[torch.Tensor]) -> None:
        """Gives this rank's keys and values, or latents, [heads, T, dim] each. When it returns, the cache has those of all ranks, besides
        this rank's own where it does not map the others' cache."""
        parts = [self._kept.as_kept(part).to(self._dtype) for part in parts]
        if self.maps_one_cache:
            self._write(layer, parts)
            self._meet(self._among)
            return
        flat = torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)
        if self._counts is None:
            self._among.broadcast(flat.view(torch.uint8))
            return
        padded = flat.new_zeros(max(self._counts), flat.shape[1])
        padded[: len(flat)] = flat
        gathered = self._among.gather(padded.view(torch.uint8)).view(self._dtype)
        flat = torch.cat([of_rank[:count] for of_rank, count in zip(gathered, self._counts, strict=True)])
        self._write(layer, _apart(flat, [(part.shape[0], part.shape[2]) for part in parts]))

    def take_all(self) -> None:
        """Writes what rank 0 gives in a step that it computes alone."""
        if self.is_idle:
            return
        tokens = len(self._places[0][0])
        for layer in self._writers:
            sizes = [(layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim)]
            if layer.latent is not None:
                sizes = [(1, sum(layer.latent))]
            width = sum(heads * dim for heads, dim in sizes)
            flat = torch.empty(tokens, width, dtype=self._dtype, device=self._kept.tensor.device)
            self._among.broadcast(flat.view(torch.uint8))
            self._write(layer.index, _apart(flat, sizes))

    def end(self) -> None:
        """When it returns, no rank reads or writes the step's blocks any more: they may be given away. In a step that rank 0's group
        computes alone, nothing else makes this rank wait for what the others of its group give to their like."""
        if not self.is_idle:
            self._meet(self._all)

    def _write(self, layer: int, parts: Sequence[torch.Tensor]) -> None:
        block, offset = self._places[self._kept.plan.group_of_layer[layer]]
        self._kept.write(layer, block, offset, *parts)

    def _meet(self, among: Collectives) -> None:
        among.sum(torch.zeros(1, device=self._kept.tensor.device))


def _apart(flat: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Takes [T, all heads of all parts] apart into [heads, T, dim] each."""
    parts = torch.split(flat, [heads * dim for heads, dim in sizes], dim=1)
    return [part.view(len(flat), *size).transpose(0, 1) for part, size in zip(parts, sizes, strict=True)]


class ExchangedAttention:
    """Paged attention (engine.model.attention.interface) of this rank's rows to the rows of all ranks."""

    def __init__(self, inner: PagedAttention, exchange: KVExchange, readers: frozenset[int]) -> None:
        self._inner, self._exchange, self._readers = inner, exchange, readers

    def begin(self, batch: Batch) -> AttentionStep:
        step = self._inner.begin(batch)
        return step if self._exchange.is_idle else _Step(step, self._exchange, self._readers)


class _Step:
    def __init__(self, inner: AttentionStep, exchange: KVExchange, readers: frozenset[int]) -> None:
        self._inner, self._exchange, self._readers = inner, exchange, readers

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionCall
    ) -> torch.Tensor:
        if (rotary := how.rotary) is not None:
            query, key = turned(query, rotary, rotary.query_norm), turned(key, rotary, rotary.key_norm)
            how = how._replace(rotary=None)
        if layer not in self._readers:
            self._exchange.give(layer, [key, value] if how.latent is None else [how.latent[None]])
        return self._inner.attend(layer, query, key, value, how)
