"""Fused operations, and on CPUs their kernels and recorded steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tandem.engine.model.capabilities import Capability, ModelLoad, ToAttend

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from tandem.engine.model.adapters import UpdatedLayers
    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.loaded import ForwardShape
    from tandem.engine.model.pieces import Pieces
    from tandem.engine.model.runner import Forward
    from tandem.engine.model.transformers_forward import TransformersForward

log = logging.getLogger(__name__)


def capability(loading: ModelLoad) -> Capability | None:
    return FusedModel(loading)


class FusedModel(Capability):
    fuses = True

    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading

    def pieces(self, dtype: torch.dtype) -> Pieces | None:
        from tandem.engine.model.fused.cpu import cpu_pieces

        return cpu_pieces(dtype, self._loading.threads) if self._loading.device.type == "cpu" else None

    def fuse(self, model: PreTrainedModel, pieces: Pieces, updates: UpdatedLayers | None) -> int | None:
        from tandem.engine.model.fused.find import fuse

        shard = self._loading.shard
        fused = fuse(model, pieces, updates, shard.all_agree if shard is not None else None)
        return fused.left if fused is not None else None

    def attention(self, of: ToAttend) -> PagedAttention | None:
        from tandem.engine.model.fused import cpu_attention
        from tandem.engine.model.fused.cpu import CpuPieces

        shard = self._loading.shard
        # It knows no heads of other ranks in its cache, and its steps are recorded, which sums over ranks cannot be.
        if not isinstance(of.pieces, CpuPieces) or (shard is not None and shard.width > 1):
            return None
        reason = cpu_attention.reason_against(of.parts.layers, of.plan, of.kv_cache.dtype, of.dtype)
        if reason is not None:
            log.info("attention gathers blocks: %s", reason)
            return None
        return cpu_attention.CpuAttention(of.pieces, of.kv_cache, of.plan, of.parts.layers)

    def recorded(self, forward: TransformersForward, plan: CachePlan, shape: ForwardShape) -> Forward | None:
        from tandem.engine.model.fused.cpu_attention import CpuAttention
        from tandem.engine.model.fused.recorded_steps import RecordedSteps

        if isinstance(forward.attention, CpuAttention):
            return RecordedSteps(forward, forward.attention)
        return None
