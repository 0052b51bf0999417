"""Short steps on a CPU, recorded once for each number of tokens and played again (engine.model.tape).

Between two steps of one size everything that a model computes differs in three things alone: the tokens, their positions, and what
attention is told of the batch. The first two lie in tensors that stay where they are; attention is told before each step, as ever.
"""

from __future__ import annotations

import logging

import torch

from tandem.engine.model.attention.cpu import CpuAttention
from tandem.engine.model.batch import Batch
from tandem.engine.model.runner import LayerHooks
from tandem.engine.model.tape import Tape
from tandem.engine.model.transformers_forward import TransformersForward

log = logging.getLogger(__name__)

# Longer steps compute for longer than Python takes.
_MOST_TOKENS = 16
# What all recordings may take together.
_MOST_BYTES = 128 << 20
# So many results of each recording are compared with the model's own before they count.
_PROOFS = 2
# So often in a row recording fails before it is not tried any more.
_MOST_REFUSED = 3


class RecordedSteps:
    """A forward pass (engine.model.runner.Forward) in front of another."""

    def __init__(self, forward: TransformersForward, attention: CpuAttention) -> None:
        self._forward = forward
        self._attention = attention
        self._recorded: dict[int, _Recorded] = {}
        self._refused: set[int] = set()
        self._bytes = 0
        self.num_replays = 0

    @property
    def attention(self) -> CpuAttention:
        return self._attention

    @property
    def num_layers(self) -> int:
        return self._forward.num_layers

    @property
    def hidden(self) -> torch.Tensor:
        return self._forward.hidden

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        size = batch.num_tokens
        if not self._may_record(batch):
            return self._forward(batch, hooks)
        recorded = self._recorded.get(size)
        if recorded is None:
            return self._record(batch, hooks)
        if recorded.proofs < _PROOFS:
            return self._prove(recorded, batch, hooks)
        layers = range(self._forward.num_layers) if hooks is not None else ()
        for layer in layers:
            hooks.wait_for_layer_load(layer)  # type: ignore[union-attr]
        logits = recorded.run(batch)
        self.num_replays += 1
        for layer in layers:
            hooks.save_kv_layer(layer)  # type: ignore[union-attr]
        return logits

    @property
    def sizes(self) -> list[int]:
        """Recorded so far, in tokens."""
        return sorted(self._recorded)

    def _may_record(self, batch: Batch) -> bool:
        size = batch.num_tokens
        return (
            size <= _MOST_TOKENS
            and size not in self._refused
            and batch.logit_rows.shape[0] == size
            and batch.hidden_rows is None
            and batch.adapter_slots is None
            and batch.image_rows is None
            and batch.rope_positions is None
            and (bool(self._recorded) or len(self._refused) < _MOST_REFUSED)
        )

    def _record(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        """This step as it comes, and then once more for the tape: it writes the same keys and values to the same places."""
        logits = self._forward(batch, hooks)
        size = batch.num_tokens
        try:
            recorded = _Recorded(self._forward, self._attention, batch)
        except RuntimeError as error:  # the very work that has just been done: it cannot be recorded
            self._refuse(size, str(error).strip().split("\n", 1)[0])
            return logits
        if self._bytes + recorded.num_bytes > _MOST_BYTES:
            self._refused.add(size)
            return logits
        self._bytes += recorded.num_bytes
        self._recorded[size] = recorded
        return logits

    def _prove(self, recorded: _Recorded, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        logits = self._forward(batch, hooks)
        recorded.proofs += 1
        if not torch.equal(recorded.run(batch).nan_to_num(), logits.nan_to_num()):
            size = batch.num_tokens
            self._bytes -= recorded.num_bytes
            del self._recorded[size]
            self._refuse(size, "played again, it gave other results than the model")
        return logits

    def _refuse(self, size: int, why: str) -> None:
        self._refused.add(size)
        log.info("steps of %d tokens are not recorded, and slower for it: %s", size, why)


class _Recorded:
    """Steps of one number of tokens."""

    def __init__(self, forward: TransformersForward, attention: CpuAttention, batch: Batch) -> None:
        self._attention = attention
        self._token_ids, self._positions = batch.token_ids.clone(), batch.positions.clone()
        self._tape = Tape()
        self.proofs = 0
        step = attention.begin(batch)
        self._logits = self._tape.record(lambda: forward.compute(self._token_ids, self._positions, step))
        self.num_bytes = self._tape.num_bytes

    def run(self, batch: Batch) -> torch.Tensor:
        """The logits of all rows, until the next step."""
        self._token_ids.copy_(batch.token_ids)
        self._positions.copy_(batch.positions)
        step = self._attention.begin(batch)  # the library points into it until the step is over
        self._tape.play()
        del step
        return self._logits
