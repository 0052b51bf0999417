"""What a CUDA device adds to the general path: FlashInfer's attention, pieces by Triton, and recorded steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.capabilities import Capability, ModelLoad, ToAttend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.cuda.flashinfer import FlashInferAttention
    from tandem.engine.model.cuda.flashinfer_latents import FlashInferLatents
    from tandem.engine.model.loaded import ForwardShape
    from tandem.engine.model.pieces import Pieces
    from tandem.engine.model.runner import Forward
    from tandem.engine.model.transformers_forward import ModelParts, TransformersForward

log = logging.getLogger(__name__)


def capability(loading: ModelLoad) -> Capability | None:
    return OnCuda(loading) if loading.device.type == "cuda" else None


class OnCuda(Capability):
    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading
        self._exact = loading.model.exact == "require"

    def pieces(self, dtype: torch.dtype) -> Pieces | None:
        from tandem.engine.model.cuda.pieces import DevicePieces
        from tandem.engine.model.cuda.triton_ops import kernels

        try:
            kernels()
        except ImportError as error:
            log.warning("the model's small operations are not fused, which is slower: %s", error)
            return None
        return DevicePieces(exact=self._exact)

    def change(self, model: PreTrainedModel) -> None:
        from tandem.engine.model.cuda.pieces import DevicePieces, take_rest

        if not self._exact:
            return
        if left := take_rest(model, DevicePieces(exact=True)):
            raise self._refusal(f"torch would compute {left[0]}, and chooses an order of sums by the step's size")

    def attention(self, of: ToAttend) -> PagedAttention | None:
        from tandem.engine.model.cuda.flashinfer import find_library

        found = attention_with(find_library(), of, exact=self._exact)
        if found is None and self._exact:
            raise self._refusal("FlashInfer does not attend, which the log gives the reason for")
        return found

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._loading.source.name} cannot be served with model.exact: require. {why}. Or leave model.exact at auto"
        )

    def recorded(self, forward: TransformersForward, plan: CachePlan, shape: ForwardShape) -> Forward | None:
        from tandem.engine.model.cuda.decode_graphs import CudaRecorder, DecodeGraphs, recorded_tokens
        from tandem.engine.model.cuda.flashinfer import FlashInferAttention
        from tandem.engine.model.cuda.same_bits import first_other_bits

        loading = self._loading
        # A pipeline stage receives and sends within a step, and contexts exchange other rows in each, which a recording cannot.
        if loading.shard is not None and (loading.shard.stages > 1 or loading.shard.contexts > 1):
            return None
        graphs = DecodeGraphs(
            forward,
            CudaRecorder(loading.device),
            num_groups=len(plan.groups),
            block_size=plan.block_size,
            max_tokens=recorded_tokens(shape),
            device=loading.device,
            shard=loading.shard,
        )
        with torch.inference_mode():
            graphs.record_ahead(lambda share: loading.progress("recording decode steps", share))
            if self._exact:
                assert isinstance(forward.attention, FlashInferAttention)
                other = first_other_bits(forward.attention, forward, graphs, shape.max_model_len)
                if other is not None:
                    raise self._refusal(f"{loading.device} computes other bits for the same tokens {other}")
        return graphs

    def step_memory(
        self, model: PreTrainedModel, parts: ModelParts, vocab_size: int
    ) -> Callable[[ForwardShape, int], int] | None:
        from tandem.engine.model.cuda.step_memory import bytes_of_step

        return functools.partial(bytes_of_step, model, parts.layers, vocab_size, self._loading.device)


def attention_with(library: Any | None, of: ToAttend, *, exact: bool = False) -> PagedAttention | None:
    """Attention by FlashInfer; None if it is not installed, does not compute this model's attention, or does not run here."""
    from tandem.engine.model.cuda import flashinfer, flashinfer_latents

    if library is None:
        return None
    layers, latents, dtype = of.parts.layers, of.parts.latents, of.dtype
    if latents is not None:
        reason = flashinfer_latents.reason_against(layers, latents, dtype)
    else:
        reason = flashinfer.reason_against(layers, dtype)
    if reason is None:
        attention: FlashInferAttention | FlashInferLatents
        if latents is not None:
            attention = flashinfer_latents.FlashInferLatents(
                library, of.kv_cache, of.plan, layers, latents, of.shape.max_model_len
            )
        else:
            attention = flashinfer.FlashInferAttention(
                library, of.kv_cache, of.plan, layers, of.shape.max_model_len, dtype, exact=exact
            )
        try:
            attention.try_out()
            return attention
        except Exception as error:  # the library's compiler and kernels may raise anything
            reason = f"flashinfer does not run here: {error}"
    log.warning("attention gathers blocks, which is slower: %s", reason)
    return None
