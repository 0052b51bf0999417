"""Paged attention by the CPU kernels for transformers' models. The kernels read the cache in place; the same call applies rotary
embedding and writes to the cache."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32

import torch

from tandem.base.errors import InternalError
from tandem.engine.model.attention.interface import AttentionCall
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.fused import tape
from tandem.engine.model.fused.cpu import CpuPieces, described
from tandem.engine.model.native.forward import checked, numbered, step_batch
from tandem.engine.model.runner import Batch
from tandem.kernels import library

_MAX_HEAD_DIM = 256


def reason_against(
    layers: tuple[AttentionLayer, ...], plan: CachePlan, kv_dtype: torch.dtype, dtype: torch.dtype
) -> str | None:
    """Why the kernels cannot compute this model's attention; None if they can."""
    if kv_dtype != dtype:
        return f"keys and values are kept in {kv_dtype}"
    for layer in layers:
        if layer.reads_of is not None or layer.chunked:
            return f"layer {layer.index} reads another layer's keys, or those of its chunk alone"
        if layer.latent:
            return f"layer {layer.index} keeps latents"
        if layer.sinks or layer.softcap is not None:
            return f"layer {layer.index} has attention sinks, or caps its scores"
        if layer.key_dim != layer.value_dim or layer.key_dim != plan.head_dim:
            return f"layer {layer.index} has heads of {layer.key_dim} and {layer.value_dim}"
        if layer.key_dim > _MAX_HEAD_DIM or layer.key_dim % 2:
            return f"layer {layer.index} has heads of {layer.key_dim}"
    return None


class CpuAttention:
    """See tandem.engine.model.attention.interface.PagedAttention."""

    def __init__(
        self, pieces: CpuPieces, tensor: torch.Tensor, plan: CachePlan, layers: tuple[AttentionLayer, ...]
    ) -> None:
        self.pieces = pieces
        self.tensor = tensor  # kept alive, because the library has its address
        self.plan = plan
        self.layers = layers
        self.kind_of_layer: list[int] = []
        kinds: dict[tuple[object, ...], int] = {}
        for layer in layers:
            group = plan.group_of_layer[layer.index]
            if layer.scale is None:
                raise InternalError("a layer whose scale was not probed")
            window = plan.groups[group].window
            kind = (layer.num_query_heads, layer.num_kv_heads, group, layer.scale)
            if kind not in kinds:
                asked = library.KernelAttentionKind(
                    heads=layer.num_query_heads,
                    kv_heads=layer.num_kv_heads,
                    cache_heads=plan.num_kv_heads,
                    head_dim=plan.head_dim,
                    group=group,
                    window=window or 0,
                    scale=layer.scale,
                )
                kinds[kind] = numbered(pieces.native.tandem_add_attention(pieces.handle, byref(asked)))
            self.kind_of_layer.append(kinds[kind])
        unused = (c_int32 * 0)()
        layout = library.CacheLayout(
            data=tensor.data_ptr(),
            blocks=tensor.shape[0],
            slots=tensor.shape[1],
            block_size=plan.block_size,
            layer_group=unused,
            layer_slot=unused,
            layer_window=unused,
            groups=len(plan.groups),
        )
        checked(pieces.native.tandem_operations_use_cache(pieces.handle, byref(layout)))

    def begin(self, batch: Batch) -> _Step:
        return _Step(self, batch)


class _Step:
    def __init__(self, attention: CpuAttention, batch: Batch) -> None:
        self._attention = attention
        # The library points into these until the step is over, so they are kept alive.
        self._batch, self._described = batch, step_batch(batch, len(attention.plan.groups))
        pieces = attention.pieces
        checked(pieces.native.tandem_operations_begin(pieces.handle, byref(self._described)))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionCall
    ) -> torch.Tensor:
        attention = self._attention
        probed = attention.layers[layer]
        rotary = how.rotary
        normed = rotary is not None and rotary.query_norm is not None
        if how.scale != probed.scale or how.softcap is not None or how.sinks is not None or normed:
            raise InternalError(f"layer {layer} attends otherwise than when it was probed")
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads * dim)
        angles = None if rotary is None else byref(_angles(rotary.cosines, rotary.sines))
        arguments = (
            attention.pieces.handle,
            attention.kind_of_layer[layer],
            attention.plan.slot_of_layer[layer],
            byref(_heads(query)),
            byref(_heads(key)),
            byref(_heads(value)),
            angles,
            byref(described(out)),
        )
        turning = () if rotary is None else (rotary.cosines, rotary.sines)
        tape.call(attention.pieces.native.tandem_attend, arguments, (query, key, value, *turning, out))
        return out.view(tokens, heads, dim)


def _heads(states: torch.Tensor) -> library.Heads:
    """[heads, T, D]"""
    head_stride, row_stride, inner = states.stride()
    if inner != 1:
        raise InternalError("heads whose elements are not side by side")
    return library.Heads(states.data_ptr(), row_stride, head_stride, states.shape[0], library.DTYPES[states.dtype])


def _angles(cosines: torch.Tensor, sines: torch.Tensor) -> ctypes.Structure:
    """[T, D] each."""
    if cosines.stride() != sines.stride() or cosines.stride(1) != 1 or cosines.dtype != sines.dtype:
        raise InternalError("cosines and sines that do not lie alike")
    return library.RotaryRows(cosines.data_ptr(), sines.data_ptr(), cosines.stride(0), library.DTYPES[cosines.dtype])
