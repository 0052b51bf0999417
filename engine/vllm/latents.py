"""Latents on CPUs, with all layers of a block side by side. vLLM's reference implementation reads them by stride, and would write them
only where a layer's blocks follow one another; its implementation for AMX does neither."""

from __future__ import annotations

from typing import Any

from tandem.base.errors import ConfigurationError


def write_by_strides(made: Any) -> str:
    """Changes how vLLM writes latents, in this process. Returns the implementation's name."""
    import torch
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    chosen = getattr(made.attention_config.backend, "name", "")
    if torch.cpu._is_amx_tile_supported() and chosen != CPUMLABackend.get_name():
        raise ConfigurationError(
            "vLLM's attention for AMX keeps each layer's latents apart, which are not handed over: set model.engine_args to "
            f"{{attention_backend: {CPUMLABackend.get_name()}}}, or serve with nodes that do both (--aggregated N)"
        )
    CPUMLAImpl.do_kv_cache_update = _write
    return str(CPUMLABackend.get_name())


def _write(impl: Any, latents: Any, positions: Any, cache: Any, slots: Any, dtype: str, scale: Any) -> None:
    """`cache` is [blocks, tokens, numbers of a latent and its position]. A slot below 0 is padding."""
    import torch

    if cache.numel() == 0:
        return
    slots = slots.flatten().to(torch.long)
    written = slots >= 0
    rows = torch.cat((latents, positions.squeeze(1)), dim=-1).to(cache.dtype)
    slots, rows = slots[written], rows[: len(slots)][written]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows
