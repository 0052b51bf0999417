"""Finds what a layer keeps of each token that attends by its own code, while its model is probed."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.caches import NotingCache
from tandem.engine.model.own_attention.step import MASK, OwnLayer, Sums, WrappedLayers, among_picked, places_for
from tandem.engine.model.own_layers import INDEXED, SUMMING

__all__ = ["among_picked", "find", "layers"]

layers = WrappedLayers


def find(
    config: Any, cache: NotingCache, index: int, kind: str | None, window: int | None
) -> tuple[AttentionLayer, OwnLayer] | None:
    """See engine.model.own_layers.OwnWing."""
    keeper = cache.keepers.get(index)
    if keeper is None or MASK not in inspect.signature(keeper.forward).parameters:
        return None
    key, value = cache.kept[index]
    if kind == INDEXED:
        return _indexed(config, cache, index, keeper)
    if kind in SUMMING:
        return _summing(config, cache, index, keeper)
    layer = AttentionLayer(
        index=index,
        num_query_heads=key.shape[1],
        num_kv_heads=max(key.shape[1], value.shape[1]),
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        window=window,
        own=True,
    )
    return layer, OwnLayer(index, keeper)


def _indexed(
    config: Any, cache: NotingCache, index: int, keeper: torch.nn.Module
) -> tuple[AttentionLayer, OwnLayer] | None:
    key, value = cache.kept[index]
    if key.shape[1] != 1 or value.shape[1] != 1:
        return None
    latent, index_dim = (key.shape[3], value.shape[3]), cache.index_dims.get(index, 0)
    layer = AttentionLayer(
        index=index,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=1,
        key_dim=sum(latent) + index_dim,
        value_dim=latent[0],
        window=None,
        latent=latent,
        own=True,
    )
    return layer, OwnLayer(index, keeper, latent)


def _summing(
    config: Any, cache: NotingCache, index: int, keeper: torch.nn.Module
) -> tuple[AttentionLayer, OwnLayer] | None:
    """What transformers' cache holds of a window that is not full is what the layer keeps of each token."""
    of_cache: Any = cache.layers[index]
    series = {name: (of_cache.buffer_kv[name], of_cache.buffer_gate[name]) for name in of_cache.buffer_kv}
    if any(part is None for pair in series.values() for part in pair):
        return None
    key_dim = cache.kept[index][0].shape[3]
    dims = [part.shape[-1] for pair in series.values() for part in pair]
    _, *places = places_for([key_dim, *dims])
    pairs = zip(places[::2], places[1::2], strict=True)
    sums = Sums(of_cache.compress_rate, dict(zip(series, pairs, strict=True)))
    ends = [key_dim, 0]
    for place in places:
        ends[place.part] = max(ends[place.part], place.begin + place.dim)
    layer = AttentionLayer(
        index=index,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=1,
        key_dim=ends[0],
        value_dim=ends[1],
        window=None,
        own=True,
    )
    return layer, OwnLayer(index, keeper, None, config.sliding_window, sums)
