"""The part of FlashInfer that Tandem uses, written in torch from its documentation, so that plans and arguments are tested without a GPU.
Its kernels read device buffers each time they run; its plans are made from host tensors."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.model import paths
from tandem.engine.model.cuda import flashinfer


@torch.library.custom_op("tandem_tests::paged_attention", mutates_args=("out",))
def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_start: torch.Tensor,
    page_start: torch.Tensor,
    pages: torch.Tensor,
    last_page_len: torch.Tensor,
    scale: float,
    window_left: int,
    softcap: float,
) -> None:
    out.fill_(float("nan"))
    page_size = keys.shape[2]
    for request in range(len(last_page_len)):
        first, last = query_start[request], query_start[request + 1]
        own = pages[page_start[request] : page_start[request + 1]].long()
        length = (len(own) - 1) * page_size + int(last_page_len[request])
        group = query.shape[1] // keys.shape[1]
        k, v = (
            part[own].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, dim=1) for part in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k.float()) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        asks = torch.arange(length - int(last - first), length)[:, None]
        there = torch.arange(length)[None]
        seen = there <= asks
        if window_left >= 0:
            seen &= there >= asks - window_left
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v.float()).to(query.dtype)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend == "fa2" or (backend == "fa3" and not use_cuda_graph)
        self._fixed = use_cuda_graph
        self._buffers: list[Any] = [
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        ]
        if use_cuda_graph:
            assert len(qo_indptr_buf) == len(paged_kv_indptr_buf) == len(paged_kv_last_page_len_buf) + 1
        self._options: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool = False,
    ) -> None:
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(tensor.dtype == torch.int32 for tensor in given)
        assert causal
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert ((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()
        options = {
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "scale": sm_scale,
            "window_left": window_left,
            "softcap": logits_soft_cap or 0.0,
            "dtypes": (q_data_type, kv_data_type),
            "splits": not disable_split_kv,
        }
        if self._fixed:
            assert self._options in ({}, options)
            assert len(self._buffers[0]) == len(qo_indptr), "another batch size than it was made for"
            for buffer, tensor in zip(self._buffers, given, strict=True):
                buffer[: len(tensor)].copy_(tensor)
        else:
            self._buffers = given
        self._options = options
        self._rows = int(qo_indptr[-1])

    def run(
        self, query: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        keys, values = kv_cache
        options = self._options
        assert query.is_contiguous()
        assert query.shape[0] == self._rows
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        assert options["heads"] == (query.shape[1], keys.shape[1], query.shape[2], keys.shape[2])
        assert options["dtypes"] == (query.dtype, keys.dtype)
        start, page_start, pages, last = self._buffers
        assert out.shape == query.shape
        paged_attention(
            out, query, keys, values, start, page_start, pages, last,
            options["scale"], options["window_left"], options["softcap"],
        )  # fmt: skip
        return out


@dataclasses.dataclass
class MLAPlanMetadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(cls, *parts: torch.Tensor) -> MLAPlanMetadata:
        return cls(*parts)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend == "fa2"
        self._fixed = use_cuda_graph
        self._buffers: list[Any] = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        given = list(dataclasses.astuple(metadata))
        assert all(tensor.dtype == torch.int32 for tensor in given)
        assert causal
        assert q_data_type == kv_data_type
        if self._fixed:
            for buffer, tensor in zip(self._buffers, given, strict=True):
                buffer[: len(tensor)].copy_(tensor)
        else:
            self._buffers = given
        self._shape = (num_heads, head_dim_ckv, head_dim_kpe, page_size, sm_scale)

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        heads, latent, rotary, page_size, scale = self._shape
        starts, page_start, pages, lengths = self._buffers
        assert query.is_contiguous()
        assert query.shape[1:] == (heads, latent + rotary)
        assert kv_cache.shape[1:] == (page_size, latent + rotary)
        assert kv_cache.stride(-1) == 1
        out = query.new_empty(query.shape[0], heads, latent)
        for request in range(len(lengths)):
            first, last = int(starts[request]), int(starts[request + 1])
            own = pages[int(page_start[request]) : int(page_start[request + 1])].long()
            length = int(lengths[request])
            kept = kv_cache[own].flatten(0, 1)[:length].float()
            asks = torch.arange(length - (last - first), length)[:, None, None]
            scores = torch.einsum("qhd,kd->qhk", query[first:last].float(), kept) * scale
            seen = torch.arange(length)[None, None] <= asks
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[first:last] = torch.einsum("qhk,kd->qhd", weights, kept[:, :latent]).to(query.dtype)
        return out


mla = SimpleNamespace(MLAPlanMetadata=MLAPlanMetadata, BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)


def use_here(patch: pytest.MonkeyPatch) -> None:
    """The models that are loaded attend by this library."""
    library = sys.modules[__name__]
    patch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    patch.setattr(
        paths,
        "_choose_attention",
        lambda of, _: flashinfer.FlashInferAttention(
            library, of.kv_cache, of.plan, of.parts.layers, of.shape.max_model_len, of.dtype
        ),
    )
