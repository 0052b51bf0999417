"""Paged attention by FlashInfer's kernels, which read the cache in place: FlashInfer's page is a block, and a layer's keys are a strided
view of the cache, [pages, heads, page, dim].

The library is optional and imported late. A model with anything that it does not compute (sinks, odd head sizes, float32) uses
gathering for all layers.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any

import numpy as np
import torch

from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.attention.pages import Pages, padded, pages_of
from tandem.engine.model.decode_inputs import DecodeInputs
from tandem.engine.model.fused.pieces import Rotary
from tandem.engine.model.fused.triton_ops import rotate_and_write
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.staging import page_locked, to_device
from tandem.wire.errors import InternalError

log = logging.getLogger(__name__)

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
# Enough for the partial results of 256 requests with 64 heads of 128, whose keys are split among thread blocks.
WORKSPACE_BYTES = 384 << 20
# Kernels that run on every card since Ampere, with the same results on all.
_EVERYWHERE = "fa2"
# Kernels for Hopper only, which are 1.5 times as fast for prompts.
_HOPPER, _HOPPER_MAJOR = "fa3", 9
_TOLERANCE = 0.02  # as a share of the largest value


def find_library() -> Any | None:
    """Imports FlashInfer. Returns None, and logs why, if it is not installed or does not load."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        log.info("attention gathers blocks: flashinfer is not installed (%s)", error)
        return None


def reason_against(layers: tuple[AttentionLayer, ...], dtype: torch.dtype) -> str | None:
    """Why the library cannot compute this model's attention; None if it can."""
    if dtype not in _DTYPES:
        return f"flashinfer does not compute in {dtype}"
    for layer in layers:
        if layer.reads_of is not None or layer.chunked:
            return f"layer {layer.index} reads another layer's keys, or those of its chunk alone"
        if layer.latent:
            return f"layer {layer.index} keeps latents"
        if layer.sinks:
            return f"layer {layer.index} has attention sinks"
        if layer.key_dim != layer.value_dim or layer.key_dim not in _HEAD_DIMS:
            return f"layer {layer.index} has heads of {layer.key_dim} and {layer.value_dim}"
    return None


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Layers that share one plan."""

    group: int
    window: int | None
    query_heads: int
    kv_heads: int
    dim: int
    scale: float
    softcap: float | None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_qo_heads": self.query_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim_qk": self.dim,
            "causal": True,
            "sm_scale": self.scale,
            # The library's window does not count the query's own key.
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
        }


def _kernels_for(device: torch.device, *, own_dtype: bool) -> str:
    """The kernels for prompts. Hopper's need keys and values in the queries' dtype."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER_MAJOR
    return _HOPPER if hopper and own_dtype else _EVERYWHERE


def _agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    error = (ours.float() - theirs.float()).abs().max()
    return bool(error <= _TOLERANCE * theirs.float().abs().max())


class FlashInferAttention:
    """See engine.model.attention.interface.PagedAttention."""

    reads_tables = False

    def __init__(
        self,
        library: Any,
        tensor: torch.Tensor,
        plan: CachePlan,
        layers: tuple[AttentionLayer, ...],
        max_model_len: int,
        dtype: torch.dtype,  # the queries' dtype; keys and values may be FP8
    ) -> None:
        self._library = library
        self.tensor = tensor
        self._dtype = dtype
        self.plan = plan
        self.kinds: list[_Kind] = []
        self.kind_of_layer: dict[int, int] = {}
        for layer in layers:
            if layer.scale is None:
                raise InternalError("the scale of a layer's scores was not found out")
            kind = _Kind(
                plan.group_of_layer[layer.index],
                plan.groups[plan.group_of_layer[layer.index]].window,
                layer.num_query_heads,
                layer.num_kv_heads,
                layer.key_dim,
                layer.scale,
                layer.softcap,
            )
            if kind not in self.kinds:
                self.kinds.append(kind)
            self.kind_of_layer[layer.index] = self.kinds.index(kind)
        # Wrappers run one after the other and keep nothing in the workspace between runs, so they share it.
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=tensor.device)
        # These wrappers are for unrecorded steps, which have prompts. Recorded steps are decodes.
        self._kernels = _kernels_for(tensor.device, own_dtype=tensor.dtype == dtype)
        self._wrappers = [self._wrapper(self._kernels) for _ in self.kinds]
        self._max_pages = -(-max_model_len // plan.block_size)
        self._page_buffers: list[torch.Tensor] = []
        self._plans_taken: torch.cuda.Event | None = None

    def _wrapper(self, kernels: str, **options: Any) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "HND", backend=kernels, **options
        )

    def begin(self, batch: Batch) -> _Step:
        if batch.host is None:
            raise InternalError("attention is planned on the host, and the batch has nothing there")
        self.plan_all(self._wrappers, [self.pages_of(batch.host, kind) for kind in self.kinds])
        return _Step(self, self._wrappers, batch.slot_mapping)

    def fixed(self, inputs: DecodeInputs) -> _FixedSteps:
        device = self.tensor.device
        wrappers = []
        for index in range(len(self.kinds)):
            needed = inputs.size * (self._max_pages + 1)
            if index == len(self._page_buffers):
                self._page_buffers.append(torch.zeros(0, dtype=torch.int32, device=device))
            if self._page_buffers[index].numel() < needed:
                # A recording that uses the smaller buffer keeps it alive.
                self._page_buffers[index] = torch.zeros(needed, dtype=torch.int32, device=device)
            numbers = [
                torch.zeros(inputs.size + more, dtype=torch.int32, device=device) for more in (1, 1, 0)
            ]
            wrappers.append(
                self._wrapper(
                    _EVERYWHERE,
                    use_cuda_graph=True,
                    qo_indptr_buf=numbers[0],
                    paged_kv_indptr_buf=numbers[1],
                    paged_kv_last_page_len_buf=numbers[2],
                    paged_kv_indices_buf=self._page_buffers[index],
                )
            )
        return _FixedSteps(self, inputs, wrappers)

    def pages_of(self, host: HostBatch, kind: _Kind) -> Pages:
        return pages_of(host, kind.group, kind.window, self.plan.block_size)

    def plan_all(self, wrappers: list[Any], pages: list[Pages]) -> None:
        """Plans each kind's wrapper for a step. The library copies a plan to the device from one page-locked buffer per wrapper, which
        it overwrites for the next plan. So this waits until the last step's copies are done."""
        if self._plans_taken is not None:
            self._plans_taken.synchronize()
        for kind, wrapper, of_kind in zip(self.kinds, wrappers, pages, strict=True):
            self._plan(wrapper, kind, of_kind)
        if self.tensor.is_cuda:
            self._plans_taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._plans_taken.record(torch.cuda.current_stream(self.tensor.device))

    def _plan(self, wrapper: Any, kind: _Kind, pages: Pages) -> None:
        """Plans one wrapper from sizes on the host, because reading them from the device would wait for it."""
        device = self.tensor.device
        wrapper.plan(
            page_locked(pages.query_start, device),
            page_locked(pages.page_start, device),
            to_device(pages.pages, device),
            page_locked(pages.last_page_len, device),
            page_size=self.plan.block_size,
            q_data_type=self._dtype,
            kv_data_type=self.tensor.dtype,
            **kind.options,
        )

    def try_out(self) -> None:
        """Attends to some tokens, so that the kernels are compiled now, and kernels that cannot run raise now. Hopper's kernels are used
        only if their results agree with the others'."""
        if self._kernels == _EVERYWHERE:
            self._tried(self._wrappers)
            return
        plain = [self._wrapper(_EVERYWHERE) for _ in self.kinds]
        right, reason = self._tried(plain), "they find something else"
        try:
            found = self._tried(self._wrappers)
            if all(_agree(one, other) for one, other in zip(found, right, strict=True)):
                return
        except Exception as error:  # the library's compiler and kernels may raise anything
            reason = str(error)
        log.warning("prompts are attended without %s, which is slower: %s", self._kernels, reason)
        self._kernels, self._wrappers = _EVERYWHERE, plain

    def _tried(self, wrappers: list[Any]) -> list[torch.Tensor]:
        """Attends to a full block of tokens for each kind, in block 1, the first that a request can have."""
        size, device = self.plan.block_size, self.tensor.device
        places, count = np.arange(size, dtype=np.int64), np.array([size], np.int32)
        groups = len(self.plan.groups)
        host = HostBatch(
            positions=places,
            query_start=np.array([0, size], np.int32),
            context_lens=count,
            slot_mapping=(places + size,) * groups,
            block_tables=(np.ones((1, 1), np.int32),) * groups,
        )
        numbers = torch.arange(self.tensor[1].numel(), device=device)
        self.tensor[1] = (numbers * 0.37).sin().to(self.tensor.dtype).view_as(self.tensor[1])
        try:
            self.plan_all(wrappers, [self.pages_of(host, kind) for kind in self.kinds])
            found = []
            for kind, wrapper in zip(self.kinds, wrappers, strict=True):
                shape = size, kind.query_heads, kind.dim
                query = torch.arange(size * kind.query_heads * kind.dim, device=device)
                query = (query * 0.71).cos().to(self._dtype).view(shape)
                out = torch.empty_like(query)
                wrapper.run(query, self._views(0, kind), out=out)
                found.append(out)
            return found
        finally:
            self.tensor[1] = 0

    def _views(self, slot: int, kind: _Kind) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.tensor[:, slot]
        return layer[:, 0, : kind.kv_heads, :, : kind.dim], layer[:, 1, : kind.kv_heads, :, : kind.dim]

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._views(self.plan.slot_of_layer[layer], self.kinds[self.kind_of_layer[layer]])


class _FixedSteps:
    def __init__(self, attention: FlashInferAttention, inputs: DecodeInputs, wrappers: list[Any]) -> None:
        self._attention = attention
        self._inputs = inputs
        self._wrappers = wrappers

    def prepare(self, host: HostBatch | None) -> None:
        attention, size = self._attention, self._inputs.size
        pages = [None if host is None else attention.pages_of(host, kind) for kind in attention.kinds]
        attention.plan_all(self._wrappers, [padded(of_kind, size) for of_kind in pages])

    def begin(self) -> _Step:
        return _Step(self._attention, self._wrappers, self._inputs.slot_mapping, pads=True)


class _Step:
    def __init__(
        self,
        attention: FlashInferAttention,
        wrappers: list[Any],
        slot_mapping: tuple[torch.Tensor, ...],
        *,
        pads: bool = False,
    ) -> None:
        self._attention = attention
        self._wrappers = wrappers
        self._slots = slot_mapping
        self._pads = pads

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        latent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attention = self._attention
        kind = attention.kinds[attention.kind_of_layer[layer]]
        if (scale, softcap) != (kind.scale, kind.softcap) or sinks is not None:
            raise InternalError(f"layer {layer} attends otherwise than when it was probed")
        views = attention.views(layer)
        asked = rotate_and_write(query, key, value, rotary, self._slots[kind.group], *views, pads=self._pads)
        out = torch.empty_like(asked)  # without it the library allocates a tensor and fills it with zeros
        self._wrappers[attention.kind_of_layer[layer]].run(asked, views, out=out)
        return out
