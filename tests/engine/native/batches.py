"""Batches and block tables for a forward pass without a scheduler."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.model.batching import tensors_of
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.runner import Batch, HostBatch

BLOCK_SIZE = 4


class Sequences:
    """A cache for some sequences; every sequence has its own blocks, in random order, in one group per window."""

    def __init__(
        self,
        forward: NativeLlamaForward,
        model: PreTrainedModel,
        windows: list[int | None],
        count: int = 1,
        length: int = 128,
    ) -> None:
        config = model.config
        per_sequence = -(-length // BLOCK_SIZE)
        kinds = sorted(set(windows), key=lambda window: window or 0)
        layers = [tuple(i for i, w in enumerate(windows) if w == kind) for kind in kinds]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rng = np.random.default_rng(1)
        order = 1 + rng.permutation(count * per_sequence * len(kinds)).astype(np.int32)
        self.tables = order.reshape(len(kinds), count, per_sequence)
        self.computed = [0] * count
        self.groups = tuple(
            KVCacheGroup(AttentionKind.SLIDING if kind else AttentionKind.FULL, BLOCK_SIZE, members, window=kind)
            for kind, members in zip(kinds, layers, strict=True)
        )
        self.cache = torch.full(
            (order.size + 1, max(map(len, layers)), 2, config.num_key_value_heads, BLOCK_SIZE, head_dim),
            float("nan"),
            dtype=next(model.parameters()).dtype,
        )
        forward.use_cache(self.cache, self.groups)

    def batch(self, work: dict[int, list[int]], logit_rows: list[int] | None = None) -> Batch:
        """`work`: the next tokens of some sequences. Logits of all rows, or of `logit_rows`."""
        members = list(work)
        lengths = [len(work[m]) for m in members]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        positions = np.concatenate([np.arange(self.computed[m], self.computed[m] + len(work[m])) for m in members])
        owner = np.repeat(members, lengths)
        slots = [
            table[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            for table in self.tables
        ]
        for m in members:
            self.computed[m] += len(work[m])
        contexts = np.array([self.computed[m] for m in members], np.int32)
        rows = list(range(starts[-1])) if logit_rows is None else logit_rows
        tables = tuple(np.ascontiguousarray(table[members]) for table in self.tables)
        host = HostBatch(positions, starts, contexts, tuple(slots), tables, np.array(rows, np.int64))
        tokens = np.array([token for m in members for token in work[m]], np.int64)
        tensors, (token_ids,) = tensors_of(host, torch.device("cpu"), tokens)
        return Batch(token_ids=token_ids, num_decodes=sum(length == 1 for length in lengths), host=host, **tensors)
