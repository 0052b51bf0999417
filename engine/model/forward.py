"""The seam between the runner, which knows requests, and what computes a batch, which knows only rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tandem.engine.model.batch import Batch
    from tandem.engine.model.runner import LayerHooks


class Forward(Protocol):
    """Computes a batch: writes its tokens' KV to the cache and returns logits for `batch.logit_rows`."""

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        """[S, vocab_size] on the model's device, in float32 or the model's dtype, valid until the next call.

        With hooks, calls `wait_for_layer_load(l)` before layer l reads the cache and `save_kv_layer(l)` once the
        batch's KV of layer l is written, for every layer, in order. A batch whose `logit_rows` is empty returns
        an empty tensor and skips what only logits need.
        """
        ...
