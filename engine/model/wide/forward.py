"""Rank 0 sends each step to the other ranks as arrays, and all ranks compute it together. Only rank 0 knows requests and samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.engine.model.batching import tensors_of
from tandem.engine.model.runner import Batch, Forward, HostBatch, LayerHooks, Replays
from tandem.engine.model.shard import Lead, Shard, exchange_logits
from tandem.engine.model.staging import on

_FIXED = 6  # the number of arrays before those of the groups
_CHOOSES = -1  # among the numbers: rank 0 has not said whether a recorded step computes the batch


def arrays_of(batch: Batch) -> list[np.ndarray]:
    """The arrays of a batch for the other ranks, without hidden rows, which only rank 0 reads. On a GPU the token ids are left out,
    because the newest may exist only on the device; a broadcast sends them."""
    host = batch.host
    tokens = batch.token_ids.numpy() if batch.token_ids.device.type == "cpu" else np.zeros(0, np.int64)
    replayed = _CHOOSES if batch.replayed is None else int(batch.replayed)
    numbers = np.array([batch.num_decodes, len(host.slot_mapping), replayed], np.int64)
    return [
        numbers,
        tokens,
        host.positions,
        host.query_start,
        host.context_lens,
        host.logit_rows,
        *host.slot_mapping,
        *host.block_tables,
    ]


def batch_of(arrays: Sequence[np.ndarray], device: torch.device) -> Batch:
    """Makes the batch from `arrays_of`'s arrays. On a GPU its token ids are zeros until the broadcast."""
    numbers, tokens, positions, query_start, context_lens, logit_rows = arrays[:_FIXED]
    num_decodes, groups, replayed = numbers.tolist()
    if device.type != "cpu":
        tokens = np.zeros(len(positions), np.int64)
    slots, tables = tuple(arrays[_FIXED : _FIXED + groups]), tuple(arrays[_FIXED + groups :])
    host = HostBatch(positions, query_start, context_lens, slots, tables, logit_rows)
    tensors, (token_ids,) = tensors_of(host, device, tokens)
    return Batch(
        token_ids=token_ids,
        num_decodes=num_decodes,
        host=host,
        replayed=None if replayed == _CHOOSES else bool(replayed),
        **tensors,
    )


class _HooksOfAll:
    """Reports a layer as saved when every rank has written its heads of it. Rank 0 knows that at the end, and when it reaches a later layer
    after a sum over the ranks. Where only experts are cut, dense layers have no sum."""

    def __init__(self, hooks: LayerHooks, shard: Shard) -> None:
        self._hooks, self._shard = hooks, shard
        self._waiting: list[int] = []
        self._sums = 0  # so many there were when the last of them was written here
        self._saved: set[int] = set()

    def wait_for_layer_load(self, layer: int) -> None:
        if self._shard.width == 1 or self._shard.link.sums > self._sums:
            waiting, self._waiting = self._waiting, []
            self._save(waiting)

    def save_kv_layer(self, layer: int) -> None:
        self._waiting.append(layer)
        self._sums = self._shard.link.sums

    def save_all(self, layers: Sequence[int]) -> None:
        """Reports all remaining layers at the end. The layers of later stages are written when their logits have arrived."""
        self._save([layer for layer in layers if layer not in self._saved])

    def _save(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._saved.add(layer)
            self._hooks.save_kv_layer(layer)


class LeadingForward:
    """Rank 0's forward pass. Requests and sampling stay in its process; the other ranks see rows and block tables."""

    def __init__(self, forward: Forward, shard: Shard, lead: Lead, layers: Sequence[int]) -> None:
        """`layers` are those with keys and values of their own, in order."""
        self._forward = forward
        self._shard = shard
        self._collectives = shard.collectives
        self._lead = lead
        self._layers = layers

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        together = None
        if isinstance(self._forward, Replays):
            # Only this rank's batch says what a recorded step cannot give, such as hidden states.
            batch = dataclasses.replace(batch, replayed=self._forward.replays(batch))
        if hooks is not None:
            for layer in self._layers:  # only rank 0 waits for loads, for all ranks
                hooks.wait_for_layer_load(layer)
            together = _HooksOfAll(hooks, self._shard)
        try:
            self._lead.send(arrays_of(batch))
            if batch.token_ids.device.type != "cpu":
                self._collectives.broadcast(batch.token_ids)
            with self._shard.link:
                logits = self._forward(batch, together)
            if self._shard.stages > 1:
                logits = exchange_logits(logits, self._shard)
            if together is not None:
                together.save_all(self._layers)
            return logits
        except Exception as error:
            cause = self._lead.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    @property
    def hidden(self) -> torch.Tensor:
        return self._forward.hidden


def follow(
    forward: Forward, receive: Callable[[], Sequence[np.ndarray] | None], shard: Shard, device: torch.device
) -> None:
    """Runs another rank: receives steps and computes them, until there are no more."""
    with on(device), torch.inference_mode():
        while (arrays := receive()) is not None:
            batch = batch_of(arrays, device)
            if device.type != "cpu":
                shard.collectives.broadcast(batch.token_ids)
            with shard.link:
                logits = forward(batch, None)
            if shard.stages > 1:
                exchange_logits(logits, shard)
