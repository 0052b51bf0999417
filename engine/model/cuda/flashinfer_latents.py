"""Decodes of models with latent attention by FlashInfer's kernels, which read the cache in place: FlashInfer's page is a block of
[tokens, latent and rotary part]. Prompts' chunks use gathering, which makes keys and values from latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.attention.gathered import GatheredCache, GroupReads, PagedStep
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.compressed import Latents
from tandem.engine.model.cuda.decode_inputs import DecodeInputs
from tandem.engine.model.cuda.flashinfer import WORKSPACE_BYTES, shared_pages
from tandem.engine.model.cuda.pages import Pages, padded, pages_of, requests_of, trial
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.staging import page_locked, to_device

_DTYPES = (torch.float16, torch.bfloat16)
_TOLERANCE = 0.02  # as a share of the largest value


def reason_against(layers: tuple[AttentionLayer, ...], latents: Latents, dtype: torch.dtype) -> str | None:
    """Why the library cannot compute this model's decodes; None if it can."""
    if dtype not in _DTYPES:
        return f"flashinfer does not compute in {dtype}"
    for layer in layers:
        latent, rotary = layer.latent or (0, 0)
        if not latent or latent % 128 or rotary % 64:
            return f"layer {layer.index} has latents of {latent} and {rotary}"
        if layer.window is not None or layer.softcap is not None or layer.sinks:
            return f"layer {layer.index} has a window, sinks, or caps its scores"
        if latents[layer.index].to_keys is None:
            return f"the matrix of layer {layer.index} that makes keys and values is not one to be absorbed"
    return None


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Layers that share one plan."""

    group: int
    heads: int
    latent: int
    rotary: int
    scale: float


class FlashInferLatents:
    """See tandem.engine.model.attention.interface.PagedAttention."""

    reads_tables = False

    def __init__(
        self,
        library: Any,
        tensor: torch.Tensor,
        plan: CachePlan,
        layers: tuple[AttentionLayer, ...],
        latents: Latents,
        max_model_len: int,
    ) -> None:
        self._library = library
        self.kept = GatheredCache(tensor, plan)
        self.plan, self.tensor, self.latents = plan, tensor, latents
        self.kinds: list[_Kind] = []
        self.kind_of_layer: dict[int, int] = {}
        for layer in layers:
            if layer.scale is None or layer.latent is None:
                raise InternalError(f"layer {layer.index} was not probed")
            kind = _Kind(plan.group_of_layer[layer.index], layer.num_query_heads, *layer.latent, scale=layer.scale)
            if kind not in self.kinds:
                self.kinds.append(kind)
            self.kind_of_layer[layer.index] = self.kinds.index(kind)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=tensor.device)
        self._wrappers = [self._wrapper() for _ in self.kinds]
        self._max_pages = -(-max_model_len // plan.block_size)
        self._page_buffers: dict[int, torch.Tensor] = {}  # by kind
        self._plans_taken: torch.cuda.Event | None = None

    def _wrapper(self, **options: Any) -> Any:
        return self._library.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2", **options)

    def begin(self, batch: Batch) -> PagedStep:
        if batch.host is None:
            raise InternalError("attention is planned on the host, and the batch has nothing there")
        groups = [self.kept.plan_group(batch, group, decodes=False) for group in range(len(self.plan.groups))]
        count = batch.num_decodes
        if count:
            self.plan_all(self._wrappers, [self.pages_of(batch.host, kind, count) for kind in self.kinds])
        return self.step(groups, self._wrappers, count)

    def fixed(self, inputs: DecodeInputs) -> _FixedSteps:
        device, size = self.tensor.device, inputs.size

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        wrappers = [
            self._wrapper(
                use_cuda_graph=True,
                qo_indptr=numbers(size + 1),
                kv_indptr=numbers(size + 1),
                kv_indices=shared_pages(self._page_buffers, index, size * (self._max_pages + 1), device),
                kv_len_arr=numbers(size),
            )
            for index in range(len(self.kinds))
        ]
        return _FixedSteps(self, inputs, wrappers)

    def pages_of(self, host: HostBatch, kind: _Kind, count: int) -> Pages:
        """The pages of the first `count` requests, which have one row each."""
        return pages_of(requests_of(host, 0, count), kind.group, None, self.plan.block_size)

    def plan_all(self, wrappers: list[Any], pages: list[Pages]) -> None:
        """See FlashInferAttention.plan_all."""
        if self._plans_taken is not None:
            self._plans_taken.synchronize()
        device = self.tensor.device
        for kind, wrapper, of_kind in zip(self.kinds, wrappers, pages, strict=True):
            lengths = (np.diff(of_kind.page_start) - 1) * self.plan.block_size + of_kind.last_page_len
            wrapper.plan(
                metadata=self._library.mla.MLAPlanMetadata.csr(
                    page_locked(of_kind.query_start, device),
                    page_locked(of_kind.page_start, device),
                    to_device(of_kind.pages, device),
                    page_locked(lengths.astype(np.int32), device),
                ),
                num_heads=kind.heads,
                head_dim_ckv=kind.latent,
                head_dim_kpe=kind.rotary,
                page_size=self.plan.block_size,
                causal=True,
                sm_scale=kind.scale,
                q_data_type=self.tensor.dtype,
                kv_data_type=self.tensor.dtype,
            )
        if self.tensor.is_cuda:
            self._plans_taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._plans_taken.record(torch.cuda.current_stream(self.tensor.device))

    def step(self, groups: list[GroupReads], wrappers: list[Any], num_decodes: int) -> PagedStep:
        def attend_decodes(layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
            if not num_decodes:
                return
            how = self.latents[layer]
            asked = how.absorbed(query[:, :num_decodes]).transpose(0, 1).contiguous()
            seen = wrappers[self.kind_of_layer[layer]].run(query=asked, kv_cache=self.view(layer))
            out[:num_decodes] = how.values_of(seen.transpose(0, 1)).transpose(0, 1)

        return self.latents.step(self.kept, groups, attend_decodes)

    def view(self, layer: int) -> torch.Tensor:
        """[pages, tokens, latent and rotary part]"""
        kind = self.kinds[self.kind_of_layer[layer]]
        return self.tensor[:, self.plan.slot_of_layer[layer], 0, 0, :, : kind.latent + kind.rotary]

    def try_out(self) -> None:
        """Computes two decodes for each kind and compares them with torch, so that kernels that cannot run raise now."""
        device, groups = self.tensor.device, len(self.plan.groups)
        host = trial(self.tensor.shape[0], self.plan.block_size, groups, (1, 1))
        count, tables = len(host.context_lens), host.block_tables
        filled = self.tensor[1 : int(tables[0].max()) + 1]
        numbers = torch.arange(filled.numel(), device=device) % 9973
        filled.copy_((numbers * 0.37).sin().view_as(filled))
        try:
            self.plan_all(self._wrappers, [self.pages_of(host, kind, count) for kind in self.kinds])
            for layer, index in self.kind_of_layer.items():
                kind, latents = self.kinds[index], self.view(layer)
                width = kind.latent + kind.rotary
                numbers = torch.arange(count * kind.heads * width, device=device) % 9967
                query = (numbers * 0.71).cos().to(self.tensor.dtype).view(count, kind.heads, width)
                found = self._wrappers[index].run(query=query, kv_cache=latents)
                pages = torch.from_numpy(tables[kind.group]).to(device)
                kept = latents[pages].float().flatten(1, 2)[:, : int(host.context_lens[0])]
                scores = (query.float() @ kept.transpose(1, 2) * kind.scale).softmax(-1)
                right = scores @ kept[..., : kind.latent]
                if (found.float() - right).abs().max() > _TOLERANCE * right.abs().max():
                    raise InternalError("it finds something else than torch does")
        finally:
            filled.zero_()


class _FixedSteps:
    def __init__(self, attention: FlashInferLatents, inputs: DecodeInputs, wrappers: list[Any]) -> None:
        self._attention, self._inputs, self._wrappers = attention, inputs, wrappers

    def prepare(self, host: HostBatch | None) -> None:
        attention, size = self._attention, self._inputs.size
        pages = [
            None if host is None else attention.pages_of(host, kind, len(host.context_lens)) for kind in attention.kinds
        ]
        attention.plan_all(self._wrappers, [padded(of_kind, size) for of_kind in pages])

    def begin(self) -> PagedStep:
        inputs, size = self._inputs, self._attention.plan.block_size
        groups = [GroupReads(slots // size, slots % size, [], inputs.padding) for slots in inputs.slot_mapping]
        return self._attention.step(groups, self._wrappers, inputs.size)
