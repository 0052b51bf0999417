"""The decoder's pass over a batch. A request's tokens are the N that the encoder reads, and after them the decoder's:

    token        0 ... N-1                          N ...
    its slot     the cross-attention's keys and     the self-attention's keys and
                 values of the encoder's row        values of the decoder's row

So a layer's two kinds of keys and values share one place in the blocks of one group: they are never of the same token. A decoder's
row reads slots 0 to N-1 in cross-attention, and N to its own in self-attention. Blocks are allocated, preempted, freed and handed
over like those of any prompt.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from tandem.base.errors import InternalError
from tandem.engine.model.attention.gathered import GatheredCache, GroupReads, PagedStep, Reads
from tandem.engine.model.attention.interface import AttentionCall, attention_options, attention_through
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.caches import StepCache, attending_layer, cache_parameter
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.engine.model.staging import to_device

Ints = npt.NDArray[np.int64]


class CrossedModel(msgspec.Struct, frozen=True):
    """A model, and what of it was found out."""

    model: PreTrainedModel
    layers: tuple[AttentionLayer, ...]  # of the decoder
    width: int  # of a row that the encoder makes
    opening: tuple[int, ...]  # the tokens that each answer begins after
    positions: int | None  # how many the decoder has; None: any number
    never: tuple[int, ...] = ()  # tokens that the model's own generation never chooses


class CrossedForward:
    """See engine.model.runner.Forward."""

    def __init__(self, crossed: CrossedModel, tensor: torch.Tensor, plan: CachePlan) -> None:
        self._model, self._layers, self._width = crossed.model, crossed.layers, crossed.width
        self._never = list(crossed.never)
        # Drafts may go beyond the last position. They are never accepted there.
        self._last = crossed.positions - 1 if crossed.positions is not None else None
        self._kept = GatheredCache(tensor, plan)
        self._cache_name = cache_parameter(inspect.signature(crossed.model.forward).parameters) or ""

    @property
    def hidden(self) -> torch.Tensor:
        raise InternalError("a model with an encoder keeps no hidden states")

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        rows = _DecoderRows(batch)
        device = batch.token_ids.device
        step = _Step(self._kept, batch, rows, hooks)
        # Transformers runs no empty sequence, so without a row of the decoder or the encoder one is made up, and nothing reads it.
        tokens = batch.token_ids[to_device(rows.index, device)] if rows.count else batch.token_ids[:1] * 0
        places = rows.places if self._last is None else np.minimum(rows.places, self._last)
        before = to_device(places - np.arange(rows.count), device) if rows.count else 0
        states = batch.encoder_states
        cache = self._step_cache(before, fills=states is not None)
        if states is None:
            states = torch.zeros(1, self._width, dtype=self._model.dtype, device=device)
        options: dict[str, Any] = {self._cache_name: cache}
        head: Any = self._model.get_output_embeddings()
        wanted = to_device(rows.logit_rows, device)
        picking = head.register_forward_pre_hook(lambda _module, given: (given[0][:, wanted],))
        try:
            with attention_through(step.through(cache)):
                output = self._model(
                    encoder_outputs=BaseModelOutput(last_hidden_state=states[None]),
                    decoder_input_ids=tokens[None],
                    decoder_attention_mask=torch.ones_like(tokens)[None],
                    use_cache=False,
                    **options,
                )
        finally:
            picking.remove()
        logits: torch.Tensor = output.logits[0]
        if self._never:
            logits[:, self._never] = float("-inf")
        return logits

    def _step_cache(self, before: int | torch.Tensor, *, fills: bool) -> EncoderDecoderCache:
        """`fills`: the encoder's rows are new in this step, so the layers make keys and values of them."""
        own, crossing = (StepCache(1 + max(layer.index for layer in self._layers), n) for n in (before, 0))
        cache = EncoderDecoderCache(own, crossing)
        if not fills:
            for layer in self._layers:
                of_layer: Any = crossing.layers[layer.index]
                of_layer.keys, of_layer.values = (
                    torch.zeros(1, layer.num_kv_heads, 0, dim, dtype=self._model.dtype, device=self._model.device)
                    for dim in (layer.key_dim, layer.value_dim)
                )
                cache.is_updated[layer.index] = True
        return cache


class _DecoderRows:
    """Which of a batch's rows are the decoder's: first requests with one row, which attention takes together, then the others."""

    def __init__(self, batch: Batch) -> None:
        host, lengths = batch.host, batch.encoder_lens
        if lengths is None:
            raise InternalError("a batch does not say how many tokens its encoder reads")
        counts = np.diff(batch.host_query_start)
        whose = np.repeat(np.arange(len(counts)), counts)
        is_decoders = host.positions >= lengths[whose]
        each = np.bincount(whose[is_decoders], minlength=len(counts))
        # A request whose prompt ends in this step reads by itself: its cross-attention's keys are written after its self-attention has read
        # the block that both have slots in.
        together = (each == 1) & (batch.host_context_lens - counts >= lengths)
        order = np.lexsort((lengths, ~together))
        self.num_together = int(together.sum())
        self.requests: Ints = order[each[order] > 0]
        self.counts: Ints = each[self.requests]
        self.encoder_lens: Ints = lengths[self.requests]
        self.contexts: Ints = batch.host_context_lens[self.requests].astype(np.int64)
        rank = np.empty(len(counts), np.int64)
        rank[order] = np.arange(len(counts))
        found = np.flatnonzero(is_decoders)
        self.index: Ints = found[np.argsort(rank[whose[found]], kind="stable")]
        self.count = len(self.index)
        self.places: Ints = host.positions[self.index] - lengths[whose[self.index]]
        self.of_encoder: Ints = np.flatnonzero(~is_decoders)
        at = np.full(len(whose), -1, np.int64)
        at[self.index] = np.arange(self.count)
        self.logit_rows: Ints = at[host.logit_rows]
        if (self.logit_rows < 0).any():
            raise InternalError("a token that the encoder reads has no logits")


class _Step:
    """One step's attention of both kinds."""

    def __init__(self, kept: GatheredCache, batch: Batch, rows: _DecoderRows, hooks: LayerHooks | None) -> None:
        self._kept, self._hooks, self._rows = kept, hooks, rows
        device, size = kept.tensor.device, kept.plan.block_size
        slots = batch.slot_mapping[0]
        table = batch.block_tables[0][to_device(rows.requests, device)]
        own, ofs = (slots[to_device(index, device)] for index in (rows.index, rows.of_encoder))
        self._reads = _reads_of(kept, table, rows, rows.encoder_lens, rows.contexts, causal=True)
        crossing = _reads_of(kept, table, rows, np.zeros_like(rows.contexts), rows.encoder_lens, causal=False)
        self._group = GroupReads(own // size, own % size, self._reads)
        self._own = PagedStep(kept, [self._group])
        self._crossing = PagedStep(kept, [GroupReads(ofs // size, ofs % size, crossing)])

    def through(self, cache: EncoderDecoderCache) -> Callable[..., tuple[torch.Tensor, None]]:
        """The attention function of a pass with this cache."""
        own, crossing = cache.self_attention_cache, cache.cross_attention_cache

        def attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            is_own = own.attending is not None
            layer = attending_layer(module, own if is_own else crossing)
            if layer is None:
                raise InternalError("an attention module does not say which layer it is")
            if self._hooks is not None and is_own:
                self._hooks.wait_for_layer_load(layer)
            if is_own and getattr(module, "has_relative_attention_bias", False):
                self._own = self._biased(module, query)
            step, how = (
                self._own if is_own else self._crossing,
                AttentionCall(**attention_options(module, query, kwargs)),
            )
            if self._rows.count:
                out = step.attend(layer, query[0], key[0], value[0], how)[None]
            else:  # nothing reads the row that was made up, and it is not kept
                out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
                if not is_own:
                    step.attend(layer, query[0, :, :0], key[0], value[0], how)
            if self._hooks is not None and not is_own:
                self._hooks.save_kv_layer(layer)
            return out, None

        return attention

    def _biased(self, module: Any, query: torch.Tensor) -> PagedStep:
        """The self-attention with this layer's bias for the distance between two tokens, which later layers may use, too."""
        rows, reads = self._rows, self._reads
        if not rows.count:
            return self._own
        longest = int(rows.places.max()) + 1
        bias = module.compute_bias(1, longest, device=query.device, past_seen_tokens=longest - 1)
        by_distance = bias[0, :, 0].flip(-1).to(query.dtype)
        first = 0
        biased = []
        for one in reads:
            requests = slice(first, first := first + one.num_requests)
            base = rows.encoder_lens[requests]
            if one.num_requests > 1:  # whole blocks are gathered
                base = base // self._kept.plan.block_size * self._kept.plan.block_size
            asks = (rows.contexts - rows.counts)[requests, None] + np.arange(one.rows_each)
            distance = asks[:, :, None] - base[:, None, None] - np.arange(one.num_keys)
            hidden = to_device(distance < 0, query.device)[:, None]
            if one.mask is not None:
                hidden = hidden | ~one.mask
            at = to_device(distance.clip(0, longest - 1), query.device)
            mask = by_distance[:, at].transpose(0, 1).masked_fill(hidden, float("-inf"))
            biased.append(dataclasses.replace(one, mask=mask))
        return PagedStep(self._kept, [dataclasses.replace(self._group, reads=biased)])


def _reads_of(
    kept: GatheredCache, table: torch.Tensor, rows: _DecoderRows, first: Ints, end: Ints, *, causal: bool
) -> list[Reads]:
    """What the decoder's rows read: the keys from `first` on, before `end`. With `causal`, `end` is after a request's last row, and
    each row reads only up to itself."""
    size, reads = kept.plan.block_size, []
    together = rows.num_together
    at = 0
    while at < together:
        # Requests that read about as much are taken together, so that little is gathered in vain.
        length = (end - first)[at:together]
        unlike = np.flatnonzero((length > 2 * length[0] + 4 * size) | (2 * length + 4 * size < length[0]))
        to = at + int(unlike[0]) if unlike.size else together
        reads.append(kept.reads_between(table[at:to], at, to, first[at:to], end[at:to]))
        at = to
    start = together
    for request in range(together, len(rows.counts)):
        count, low, high = int(rows.counts[request]), int(first[request]), int(end[request])
        blocks = kept.rows_of(table[request : request + 1, low // size : (high - 1) // size + 1])
        mask = None
        if causal:
            asks = torch.arange(high - count, high, device=table.device)[:, None]
            mask = torch.arange(low, high, device=table.device)[None] <= asks
        reads.append(Reads(start, start + count, 1, count, blocks, low % size, high - low, mask, causal=False))
        start += count
    return reads
