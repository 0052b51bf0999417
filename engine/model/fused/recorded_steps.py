"""Records short steps on a CPU once for each number of tokens, and replays them (engine.model.fused.tape).

Two steps of one kind differ in four things only: the tokens, their positions, their adapters' slots, and attention's batch. The first
three are copied into tensors at fixed addresses before a replay; attention gets the batch before each step anyway.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from tandem.engine.model.fused.cpu_attention import CpuAttention
from tandem.engine.model.fused.tape import Tape
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.engine.model.transformers_forward import TransformersForward

log = logging.getLogger(__name__)

# In longer steps computing takes longer than Python, so recording gains little.
_MOST_TOKENS = 16
# The most memory of all recordings together.
_MOST_BYTES = 128 << 20
# How many replays of each recording are compared with the model's own results before replays are used.
_PROOFS = 2
# If this many kinds were refused and none recorded, no further kind is tried.
_MOST_REFUSED = 3


class _Kind(NamedTuple):
    tokens: int
    slots: int  # how many adapter slots the step uses; 0: no row has an adapter


class RecordedSteps:
    """A forward pass (engine.model.runner.Forward) that wraps another and replays recorded steps."""

    def __init__(self, forward: TransformersForward, attention: CpuAttention) -> None:
        self._forward = forward
        self.attention = attention
        self._recorded: dict[_Kind, _Recorded] = {}
        self._refused: set[_Kind] = set()
        self._bytes = 0
        self.num_replays = 0

    @property
    def num_layers(self) -> int:
        return self._forward.num_layers

    @property
    def hidden(self) -> torch.Tensor:
        return self._forward.hidden

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        kind = _Kind(batch.num_tokens, batch.adapter_slots_used if batch.adapter_slots is not None else 0)
        if not self._may_record(kind, batch):
            return self._forward(batch, hooks)
        recorded = self._recorded.get(kind)
        if recorded is not None and recorded.is_old:
            self._forget(kind)
            recorded = None
        if recorded is None:
            return self._record(kind, batch, hooks)
        if recorded.proofs < _PROOFS:
            return self._prove(kind, recorded, batch, hooks)
        layers = range(self._forward.num_layers) if hooks is not None else ()
        for layer in layers:
            hooks.wait_for_layer_load(layer)  # type: ignore[union-attr]
        logits = recorded.run(batch)
        self.num_replays += 1
        for layer in layers:
            hooks.save_kv_layer(layer)  # type: ignore[union-attr]
        return logits

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Recorded so far: (tokens, adapters' slots)."""
        return sorted(self._recorded)

    def _may_record(self, kind: _Kind, batch: Batch) -> bool:
        return (
            kind.tokens <= _MOST_TOKENS
            and kind not in self._refused
            and batch.logit_rows.shape[0] == kind.tokens
            and batch.hidden_rows is None
            and batch.image_rows is None
            and batch.rope_positions is None
            and (bool(self._recorded) or len(self._refused) < _MOST_REFUSED)
        )

    def _record(self, kind: _Kind, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        """Computes the step, and then again for the recording, which writes the same keys and values to the same slots."""
        logits = self._forward(batch, hooks)
        try:
            recorded = _Recorded(self._forward, self.attention, batch)
        except RuntimeError as error:  # the same work has just succeeded, so it cannot be recorded
            self._refuse(kind, str(error).strip().split("\n", 1)[0])
            return logits
        if self._bytes + recorded.num_bytes > _MOST_BYTES:
            self._refused.add(kind)
            return logits
        self._bytes += recorded.num_bytes
        self._recorded[kind] = recorded
        return logits

    def _prove(self, kind: _Kind, recorded: _Recorded, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        logits = self._forward(batch, hooks)
        recorded.proofs += 1
        if not torch.equal(recorded.run(batch).nan_to_num(), logits.nan_to_num()):
            self._forget(kind)
            self._refuse(kind, "played again, it gave other results than the model")
        return logits

    def _forget(self, kind: _Kind) -> None:
        self._bytes -= self._recorded.pop(kind).num_bytes

    def _refuse(self, kind: _Kind, why: str) -> None:
        self._refused.add(kind)
        log.info("steps of %d tokens are not recorded, which is slower: %s", kind.tokens, why)


class _Recorded:
    def __init__(self, forward: TransformersForward, attention: CpuAttention, batch: Batch) -> None:
        self._attention, self._adapted = attention, forward.adapted
        self._token_ids, self._positions = batch.token_ids.clone(), batch.positions.clone()
        self._slots = batch.adapter_slots.clone() if batch.adapter_slots is not None else None
        self._stacked = self._updated_layers
        self._tape = Tape()
        self.proofs = 0
        step = attention.begin(batch)

        def compute() -> torch.Tensor:
            with forward.adapting(self._slots, batch.adapter_slots_used):
                return forward.compute(self._token_ids, self._positions, step)

        self._logits = self._tape.record(compute)
        self.num_bytes = self._tape.num_bytes

    @property
    def _updated_layers(self) -> int:
        return self._adapted.stacked if self._adapted is not None and self._slots is not None else 0

    @property
    def is_old(self) -> bool:
        """An adapter was loaded since the recording that changes further layers."""
        return self._updated_layers != self._stacked

    def run(self, batch: Batch) -> torch.Tensor:
        """Replays the recording; returns the logits of all rows, which are valid until the next step."""
        self._token_ids.copy_(batch.token_ids)
        self._positions.copy_(batch.positions)
        if self._slots is not None and batch.adapter_slots is not None:
            self._slots.copy_(batch.adapter_slots)
        # The library points into `step`, so it must live until the replay is over.
        step = self._attention.begin(batch)
        self._tape.play()
        del step
        return self._logits
