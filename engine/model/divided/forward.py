"""A forward pass (engine.model.runner.Forward) in which each rank computes its rows of the step that all are told."""

from __future__ import annotations

import torch

from tandem.engine.model.divided.division import divide, part_of, rows_of
from tandem.engine.model.divided.exchange import KVExchange
from tandem.engine.model.runner import Batch, Forward, LayerHooks
from tandem.engine.model.shard import Shard


class _SavedOneLayerLate:
    """Reports a layer as saved when rank 0 has every rank's keys and values of the next one: each rank gives those only
    after it has written the layer to its own cache, from where they go to other nodes. The last layers are reported when
    the step is over."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks
        self._written: int | None = None

    def wait_for_layer_load(self, layer: int) -> None:
        self._hooks.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        if self._written is not None:
            self._hooks.save_kv_layer(self._written)
        self._written = layer


class DividedForward:
    def __init__(self, forward: Forward, exchange: KVExchange, shard: Shard) -> None:
        self._forward, self._exchange = forward, exchange
        self._contexts, self._context = shard.contexts, shard.context

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        """Returns rank 0's logits there, and none on the ranks of other contexts."""
        runs, context = divide(batch, self._contexts), self._context
        rows = None if runs is None else [rows_of(own) for own in runs]
        self._exchange.begin(batch, rows, context)
        logits = torch.empty(0)
        if hooks is not None and not self._exchange.maps_one_cache:
            # What rank 0 computes alone, other ranks write whenever it comes to them.
            hooks = None if runs is None else _SavedOneLayerLate(hooks)
        if runs is not None:
            logits = self._forward(part_of(batch, runs[context]), hooks)
        elif context == 0:
            logits = self._forward(batch, hooks)
        else:
            self._exchange.take_all()
        self._exchange.end()
        return logits

    @property
    def hidden(self) -> torch.Tensor:
        return self._forward.hidden
