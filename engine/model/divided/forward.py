"""A forward pass (engine.model.runner.Forward) in which each rank computes its rows of the step that all are told."""

from __future__ import annotations

import torch

from tandem.engine.model.divided.division import divide, part_of, rows_of
from tandem.engine.model.divided.exchange import KVExchange
from tandem.engine.model.runner import Batch, Forward, LayerHooks
from tandem.engine.model.shard import Shard


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
