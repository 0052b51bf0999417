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
from tandem.engine.model.cuda.flashinfer import PlannedAttention, agree, known_content, known_queries
from tandem.engine.model.cuda.pages import Pages, pages_of, requests_of, trial
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.staging import page_locked, to_device

_DTYPES = (torch.float16, torch.bfloat16)


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


def _kind_of(layer: AttentionLayer, plan: CachePlan) -> _Kind:
    if layer.scale is None or layer.latent is None:
        raise InternalError(f"layer {layer.index} was not probed")
    return _Kind(plan.group_of_layer[layer.index], layer.num_query_heads, *layer.latent, scale=layer.scale)


class FlashInferLatents(PlannedAttention[_Kind]):
    """See tandem.engine.model.attention.interface.PagedAttention."""

    buffers = ("qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices")

    def __init__(
        self,
        library: Any,
        tensor: torch.Tensor,
        plan: CachePlan,
        layers: tuple[AttentionLayer, ...],
        latents: Latents,
        max_model_len: int,
    ) -> None:
        super().__init__(library, tensor, plan, max_model_len, {layer.index: _kind_of(layer, plan) for layer in layers})
        self.kept, self.latents = GatheredCache(tensor, plan), latents
        self._wrappers = [self._wrapper() for _ in self.kinds]

    def _wrapper(self, kernels: str = "fa2", **options: Any) -> Any:
        return self._library.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend=kernels, **options)

    def begin(self, batch: Batch) -> PagedStep:
        groups = [self.kept.plan_group(batch, group, decodes=False) for group in range(len(self.plan.groups))]
        if count := batch.num_decodes:
            decodes = requests_of(batch.host, 0, count)
            self.plan_all(self._wrappers, [self.pages_of(decodes, kind) for kind in self.kinds])
        return self.step(groups, self._wrappers, count)

    def fixed_step(self, wrappers: list[Any], inputs: DecodeInputs) -> PagedStep:
        size = self.plan.block_size
        groups = [GroupReads(slots // size, slots % size, [], inputs.padding) for slots in inputs.slot_mapping]
        return self.step(groups, wrappers, inputs.size)

    def pages_of(self, host: HostBatch, kind: _Kind) -> Pages:
        return pages_of(host, kind.group, None, self.plan.block_size)

    def _plan(self, wrapper: Any, kind: _Kind, pages: Pages) -> None:
        device = self.tensor.device
        lengths = (np.diff(pages.page_start) - 1) * self.plan.block_size + pages.last_page_len
        wrapper.plan(
            metadata=self._library.mla.MLAPlanMetadata.csr(
                page_locked(pages.query_start, device),
                page_locked(pages.page_start, device),
                to_device(pages.pages, device),
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
        device = self.tensor.device
        host = trial(self.tensor.shape[0], self.plan.block_size, len(self.plan.groups), (1, 1))
        with known_content(self.tensor, host):
            self.plan_all(self._wrappers, [self.pages_of(host, kind) for kind in self.kinds])
            for layer, index in self.kind_of_layer.items():
                kind, latents = self.kinds[index], self.view(layer)
                shape = len(host.context_lens), kind.heads, kind.latent + kind.rotary
                query = known_queries(shape, self.tensor.dtype, device)
                found = self._wrappers[index].run(query=query, kv_cache=latents)
                pages = torch.from_numpy(host.block_tables[kind.group]).to(device)
                kept = latents[pages].float().flatten(1, 2)[:, : int(host.context_lens[0])]
                scores = (query.float() @ kept.transpose(1, 2) * kind.scale).softmax(-1)
                if not agree(found, scores @ kept[..., : kind.latent]):
                    raise InternalError("it finds something else than torch does")
