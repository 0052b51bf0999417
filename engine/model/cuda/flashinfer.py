"""Paged attention by FlashInfer's kernels, which read the cache in place: FlashInfer's page is a block, and a layer's keys are a strided
view of the cache, [pages, heads, page, dim].

The library is optional and imported late. A model with anything that it does not compute (sinks, odd head sizes, float32) uses
gathering for all layers.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.attention.interface import AttentionCall, AttentionStep
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.cuda.decode_inputs import DecodeInputs, as_rows
from tandem.engine.model.cuda.pages import Pages, padded, pages_of, requests_of, trial
from tandem.engine.model.cuda.triton_ops import rotate_and_write
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.staging import DeviceMark, page_locked, to_device

log = logging.getLogger(__name__)

KindT = TypeVar("KindT")

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
# Enough for the partial results of 256 requests with 64 heads of 128, whose keys are split among thread blocks.
WORKSPACE_BYTES = 384 << 20
# Kernels that run on every card since Ampere, with the same results on all.
_EVERYWHERE = "fa2"
# Kernels for Hopper only, which are 1.5 times as fast for prompts. They compute 128 rows for a request that has fewer, for each query
# head, and do not share a request's keys among processors. So requests with few rows (decodes, drafts) are left to the others.
_HOPPER, _HOPPER_MAJOR = "fa3", 9
_FEW_ROWS = 16
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


def bytes_of_pages(layers: tuple[AttentionLayer, ...], rows: int, max_model_len: int, block_size: int) -> int:
    """The most device memory that the lists of pages of recorded steps of up to `rows` rows take."""
    kinds = {
        (layer.window, layer.num_query_heads, layer.num_kv_heads, layer.key_dim, layer.scale, layer.softcap)
        for layer in layers
    }
    return len(kinds) * 4 * rows * (-(-max_model_len // block_size) + 1)


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    error = (ours.float() - theirs.float()).abs().max()
    return bool(error <= _TOLERANCE * theirs.float().abs().max())


@contextmanager
def known_content(tensor: torch.Tensor, host: HostBatch) -> Iterator[None]:
    """Inside, the first blocks of the cache, up to the last one of this step, have numbers that a trial knows; afterwards zeros."""
    filled = tensor[1 : int(host.block_tables[0].max()) + 1]
    numbers = torch.arange(filled.numel(), device=filled.device) % 9973
    filled.copy_((numbers * 0.37).sin().view_as(filled))
    try:
        yield
    finally:
        filled.zero_()


def known_queries(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape)), device=device) % 9967
    return (numbers * 0.71).cos().to(dtype).view(shape)


class PlannedAttention(Generic[KindT]):
    """Attention by the library's wrappers. Layers of one kind share a wrapper, and the host plans each wrapper before a step."""

    reads_tables = False
    # A wrapper's names of the buffers that its recorded steps read: starts of rows and of pages, the last pages' lengths, and pages.
    buffers: tuple[str, str, str, str]

    def __init__(
        self, library: Any, tensor: torch.Tensor, plan: CachePlan, max_model_len: int, kinds: Mapping[int, KindT]
    ) -> None:
        """`kinds`: by layer."""
        self._library, self.tensor, self.plan = library, tensor, plan
        self.kinds: list[KindT] = list(dict.fromkeys(kinds.values()))
        self.kind_of_layer = {layer: self.kinds.index(kind) for layer, kind in kinds.items()}
        # Wrappers run one after the other and keep nothing in the workspace between runs, so they share it.
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=tensor.device)
        self._max_pages = -(-max_model_len // plan.block_size)
        # Pages of recorded steps, by kind: all recordings share them, because each replay lists its own first. The largest recording comes
        # first; one that used a smaller buffer keeps that alive.
        self._pages: dict[int, torch.Tensor] = {}
        self._plans_taken = DeviceMark(tensor.device)

    def _wrapper(self, kernels: str = _EVERYWHERE, **options: Any) -> Any:
        raise NotImplementedError

    def _plan(self, wrapper: Any, kind: KindT, pages: Pages) -> None:
        """Plans one wrapper from sizes on the host, because reading them from the device would wait for it."""
        raise NotImplementedError

    def pages_of(self, host: HostBatch, kind: KindT) -> Pages:
        raise NotImplementedError

    def fixed_step(self, wrappers: list[Any], inputs: DecodeInputs) -> AttentionStep:
        raise NotImplementedError

    def plan_all(self, wrappers: list[Any], pages: list[Pages]) -> None:
        """Plans each kind's wrapper for a step, or several times as many for its parts. The library copies a plan to the device from one
        page-locked buffer per wrapper, which it overwrites for the next plan. So this waits until the last step's copies are done."""
        self._plans_taken.wait()
        for index, (wrapper, of_kind) in enumerate(zip(wrappers, pages, strict=True)):
            self._plan(wrapper, self.kinds[index % len(self.kinds)], of_kind)
        self._plans_taken = DeviceMark(self.tensor.device)

    def fixed(self, inputs: DecodeInputs) -> FixedSteps:
        wrappers = []
        for index in range(len(self.kinds)):
            count = inputs.size * (self._max_pages + 1)
            if index not in self._pages or self._pages[index].numel() < count:
                self._pages[index] = self._numbers(count)
            sizes = [self._numbers(inputs.size + more) for more in (1, 1, 0)]
            named: dict[str, Any] = dict(zip(self.buffers, (*sizes, self._pages[index]), strict=True))
            wrappers.append(self._wrapper(use_cuda_graph=True, **named))
        return FixedSteps(self, inputs, wrappers)

    def _numbers(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.tensor.device)


class FixedSteps:
    """See FixedAttention."""

    def __init__(self, attention: PlannedAttention[Any], inputs: DecodeInputs, wrappers: list[Any]) -> None:
        self._attention, self._inputs, self._wrappers = attention, inputs, wrappers

    def prepare(self, host: HostBatch | None) -> None:
        attention = self._attention
        pages = [None if host is None else attention.pages_of(host, kind) for kind in attention.kinds]
        attention.plan_all(self._wrappers, [padded(of_kind, self._inputs.size) for of_kind in pages])

    def begin(self) -> AttentionStep:
        return self._attention.fixed_step(self._wrappers, self._inputs)


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


def _kind_of(layer: AttentionLayer, plan: CachePlan) -> _Kind:
    if layer.scale is None:
        raise InternalError("the scale of a layer's scores was not found out")
    group = plan.group_of_layer[layer.index]
    heads = layer.num_query_heads, layer.num_kv_heads
    return _Kind(group, plan.groups[group].window, *heads, layer.key_dim, layer.scale, layer.softcap)


def _kernels_for(device: torch.device, *, own_dtype: bool) -> str:
    """The kernels for prompts. Hopper's need keys and values in the queries' dtype."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER_MAJOR
    return _HOPPER if hopper and own_dtype else _EVERYWHERE


class FlashInferAttention(PlannedAttention[_Kind]):
    """See engine.model.attention.interface.PagedAttention."""

    buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_last_page_len_buf", "paged_kv_indices_buf")

    def __init__(
        self,
        library: Any,
        tensor: torch.Tensor,
        plan: CachePlan,
        layers: tuple[AttentionLayer, ...],
        max_model_len: int,
        dtype: torch.dtype,  # the queries' dtype; keys and values may be FP8
        *,
        exact: bool = False,
    ) -> None:
        """If it is `exact`, a token gets the same bits in any company and however its prompt is cut: each is a request of its own, and one
        group of processors reads all its keys in order. The library's tiles depend on the rows of requests, and by itself it splits
        keys by what else is in the step. Recorded steps cannot have splits of a fixed size: their room is that of the first plan."""
        super().__init__(library, tensor, plan, max_model_len, {layer.index: _kind_of(layer, plan) for layer in layers})
        self._dtype = dtype
        self._exact = exact
        # These wrappers are for unrecorded steps, which have prompts. Recorded steps are decodes.
        self._wrappers = [self._wrapper() for _ in self.kinds]
        # Those for long chunks; None if the same kernels take all requests.
        self._of_chunks: list[Any] | None = None
        if not exact and _kernels_for(tensor.device, own_dtype=tensor.dtype == dtype) == _HOPPER:
            self._of_chunks = [self._wrapper(_HOPPER) for _ in self.kinds]

    def _wrapper(self, kernels: str = _EVERYWHERE, **options: Any) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=kernels, **options)

    def begin(self, batch: Batch) -> _Step:
        parts = self._parts(as_rows(batch.host) if self._exact else batch.host)
        self.plan_all(
            [wrapper for part in parts for wrapper in part.wrappers],
            [self.pages_of(part.host, kind) for part in parts for kind in self.kinds],
        )
        return _Step(self, [(part.wrappers, part.rows) for part in parts], batch.slot_mapping)

    def _parts(self, host: HostBatch) -> list[_Part]:
        """Divides a step's requests: the leading ones with few rows, and the others."""
        count = len(host.context_lens)
        few = count
        if self._of_chunks is not None:
            long = np.diff(host.query_start) > _FEW_ROWS
            few = int(long.argmax()) if long.any() else count
        parts = [(self._wrappers, 0, few)] if few else []
        if few < count and self._of_chunks is not None:
            parts.append((self._of_chunks, few, count))
        return [
            _Part(wrappers, requests_of(host, first, end), slice(*host.query_start[[first, end]].tolist()))
            for wrappers, first, end in parts
        ]

    def fixed_step(self, wrappers: list[Any], inputs: DecodeInputs) -> _Step:
        return _Step(self, [(wrappers, slice(None))], inputs.slot_mapping, pads=True)

    def pages_of(self, host: HostBatch, kind: _Kind) -> Pages:
        return pages_of(host, kind.group, kind.window, self.plan.block_size)

    def _plan(self, wrapper: Any, kind: _Kind, pages: Pages) -> None:
        device = self.tensor.device
        wrapper.plan(
            page_locked(pages.query_start, device),
            page_locked(pages.page_start, device),
            to_device(pages.pages, device),
            page_locked(pages.last_page_len, device),
            page_size=self.plan.block_size,
            q_data_type=self._dtype,
            kv_data_type=self.tensor.dtype,
            disable_split_kv=self._exact,
            **kind.options,
        )

    def try_out(self) -> None:
        """Attends to some tokens and compares with torch, so that the kernels are compiled now, and kernels that cannot run raise now.
        Hopper's kernels are used only if they find the same."""
        size = self.plan.block_size
        host = trial(self.tensor.shape[0], size, len(self.plan.groups), (1, size + 1))
        with known_content(self.tensor, host):
            right = [self._by_torch(host, kind) for kind in self.kinds]
            if not self._agrees(self._wrappers, host, right):
                raise InternalError("it finds something else than torch does")
            if self._of_chunks is None:
                return
            try:
                reason = None if self._agrees(self._of_chunks, host, right) else "they find something else"
            except Exception as error:  # the library's compiler and kernels may raise anything
                reason = str(error)
            if reason is not None:
                log.warning("prompts are attended without %s, which is slower: %s", _HOPPER, reason)
                self._of_chunks = None

    def _asked(self, host: HostBatch, kind: _Kind) -> torch.Tensor:
        return known_queries((len(host.positions), kind.query_heads, kind.dim), self._dtype, self.tensor.device)

    def _by_torch(self, host: HostBatch, kind: _Kind) -> torch.Tensor:
        """float32 [T, query heads, D], by reading each request's own pages in order."""
        asked, views = self._asked(host, kind).float(), self._views(0, kind)
        found = torch.empty_like(asked)
        for request, context in enumerate(host.context_lens.tolist()):
            rows = slice(*host.query_start[request : request + 2].tolist())
            pages = torch.from_numpy(host.block_tables[kind.group][request]).to(asked.device)
            key, value = (view[pages].float().transpose(0, 1).flatten(1, 2)[None, :, :context] for view in views)
            there = torch.arange(context, device=asked.device)
            asks = torch.from_numpy(host.positions[rows]).to(asked.device)[:, None]
            seen = (there <= asks) & (there > asks - (kind.window or context + 1))
            query = asked[rows].transpose(0, 1)[None]
            out = attend(query, key, value, mask=seen, causal=False, scale=kind.scale, softcap=kind.softcap)
            found[rows] = out[0].transpose(0, 1)
        return found

    def _agrees(self, wrappers: list[Any], host: HostBatch, right: list[torch.Tensor]) -> bool:
        self.plan_all(wrappers, [self.pages_of(host, kind) for kind in self.kinds])
        found = []
        for kind, wrapper in zip(self.kinds, wrappers, strict=True):
            query = self._asked(host, kind)
            out = torch.empty_like(query)
            wrapper.run(query, self._views(0, kind), out=out)
            found.append(out)
        return all(agree(ours, theirs) for ours, theirs in zip(found, right, strict=True))

    def _views(self, slot: int, kind: _Kind) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.tensor[:, slot]
        return layer[:, 0, : kind.kv_heads, :, : kind.dim], layer[:, 1, : kind.kv_heads, :, : kind.dim]

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._views(self.plan.slot_of_layer[layer], self.kinds[self.kind_of_layer[layer]])


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive requests of a step that the same wrappers attend to."""

    wrappers: list[Any]  # one for each kind
    host: HostBatch
    rows: slice  # their rows in the step


class _Step:
    def __init__(
        self,
        attention: FlashInferAttention,
        parts: list[tuple[list[Any], slice]],  # wrappers, one for each kind, and the rows that they attend to
        slot_mapping: tuple[torch.Tensor, ...],
        *,
        pads: bool = False,
    ) -> None:
        self._attention = attention
        self._parts = parts
        self._slots = slot_mapping
        self._pads = pads

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionCall
    ) -> torch.Tensor:
        attention = self._attention
        kind = attention.kinds[attention.kind_of_layer[layer]]
        if (how.scale, how.softcap) != (kind.scale, kind.softcap) or how.sinks is not None:
            raise InternalError(f"layer {layer} attends otherwise than when it was probed")
        views = attention.views(layer)
        asked = rotate_and_write(query, key, value, how.rotary, self._slots[kind.group], *views, pads=self._pads)
        out = torch.empty_like(asked)  # without it the library allocates a tensor and fills it with zeros
        for wrappers, rows in self._parts:
            wrappers[attention.kind_of_layer[layer]].run(asked[rows], views, out=out[rows])
        return out
