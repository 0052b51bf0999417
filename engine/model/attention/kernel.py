"""Attention in torch, with grouped queries, masks, soft-capping and sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The explicit form holds its scores in float32. It computes more than this many in slices of queries.
_MAX_SCORES = 1 << 25


def attend(
    query: torch.Tensor,  # [N, query heads, Q, D]
    key: torch.Tensor,  # [N, KV heads, L, D]
    value: torch.Tensor,  # [N, KV heads, L, DV]
    *,
    mask: torch.Tensor | None,  # bool, broadcastable to [N, 1, Q, L]; True may be seen
    causal: bool,  # query i sees keys 0..i; needs Q == L, and no mask
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [query heads]: the score of a key that has no value
) -> torch.Tensor:
    """[N, query heads, Q, DV]"""
    if softcap is None and sinks is None:
        return _fused(query, key, value, mask, causal, scale)
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    batch, heads, rows, _ = query.shape
    step = max(1, _MAX_SCORES // max(1, batch * heads * key.shape[2]))
    if rows <= step:
        return _explicit(query, key, value, mask, scale, softcap, sinks)
    parts = [
        _explicit(
            query[:, :, start : start + step],
            key,
            value,
            mask if mask is None or mask.shape[-2] == 1 else mask[..., start : start + step, :],
            scale,
            softcap,
            sinks,
        )
        for start in range(0, rows, step)
    ]
    return torch.cat(parts, dim=2)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    if rows == 1 and heads != kv_heads:
        # The queries of a group share keys and mask, so they can take the dimension of the query positions.
        packed = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, value.shape[-1])
    if heads != kv_heads and _repeats_heads(query, mask):
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads != key.shape[1]
    )


def _repeats_heads(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether keys are repeated for every query head. CUDA's fast kernels need that with a mask; the slow one would hold all scores."""
    return mask is not None and query.device.type == "cuda"


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, rows, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    packed = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    scores = torch.matmul(packed, key.transpose(2, 3)).float().mul_(scale)
    scores = scores.view(batch, heads, rows, length)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.to(value.dtype).reshape(batch, kv_heads, heads // kv_heads * rows, length)
    return torch.matmul(weights, value).reshape(batch, heads, rows, value.shape[-1])
