"""Rank 0 tells the others what to compute, and they compute it with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.engine.model.batch import Batch
from tandem.engine.model.runner import Forward, LayerHooks
from tandem.engine.model.staging import on
from tandem.engine.model.wide.batches import arrays_of, batch_of
from tandem.engine.model.wide.shard import Lead, Shard


class LeadingForward:
    """Rank 0's. Requests, sampling and all that follows from them stay in its process: the others see rows and tables."""

    def __init__(self, forward: Forward, shard: Shard, lead: Lead) -> None:
        self._forward = forward
        self._collectives = shard.collectives
        self._lead = lead

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        try:
            self._lead.send(arrays_of(batch))
            if batch.token_ids.device.type != "cpu":
                self._collectives.broadcast(batch.token_ids)
            return self._forward(batch, hooks)
        except Exception as error:
            cause = self._lead.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    @property
    def hidden(self) -> torch.Tensor:
        return self._forward.hidden


def follow(
    forward: Forward,
    receive: Callable[[], Sequence[np.ndarray] | None],
    shard: Shard,
    device: torch.device,
) -> None:
    """Another rank's life, until there is nothing more to receive."""
    with on(device), torch.inference_mode():
        while (arrays := receive()) is not None:
            batch = batch_of(arrays, device)
            if device.type != "cpu":
                shard.collectives.broadcast(batch.token_ids)
            forward(batch, None)
