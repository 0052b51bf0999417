"""Computes how many KV cache blocks fit into memory, and allocates their tensor."""

from __future__ import annotations

import logging
import mmap

import numpy as np
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig
from tandem.engine.model.attention.layers import CachePlan
from tandem.machine.resources import free_memory

log = logging.getLogger(__name__)

# On a CPU the cache shares memory with everything else on the machine, so by default it takes no more than this, or than one request
# of full length needs if that is more.
CPU_CAP_BYTES = 4 << 30

_MIB = 1 << 20


def available_bytes(device: torch.device) -> int:
    """How many bytes can be allocated now without taking memory from another process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def size_block_pool(
    plan: CachePlan,
    cache: CacheConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
    tokens_per_step: int,
    beside: int = 0,
    more_per_block: int = 0,
    mapped: int = 0,
) -> int:
    """Returns the number of blocks, with the null block: at most what all sequences at full length can use. `beside` bytes, which a
    step needs besides the cache, stay free whatever the cache's share is. `more_per_block` is what others keep beside each block.
    `mapped` bytes of files are in use, although the system counts them as free."""
    block_bytes = plan.elements_per_block * dtype.itemsize + more_per_block
    one_request = plan.blocks_for(max_model_len, tokens_per_step)
    needed = (one_request + 1) * block_bytes
    free = max(0, available_bytes(device) - mapped)
    if cache.memory_bytes is not None:
        if cache.memory_bytes > free:
            raise ConfigurationError(
                f"--kv-memory asks for {_mib(cache.memory_bytes)}, but only {_mib(free)} is free: "
                f"{_mib(cache.memory_bytes - free)} is missing"
            )
        budget = cache.memory_bytes
        hint = "raise --kv-memory"
    else:
        budget = min(int(free * cache.share_on(device.type)), max(0, free - beside))
        if device.type == "cpu":
            budget = min(budget, max(CPU_CAP_BYTES, needed))
        hint = "give the cache more with --kv-memory"
    if budget < needed:
        raise ConfigurationError(
            f"the KV cache needs {_mib(needed)} for one request of {max_model_len} tokens and may use {_mib(budget)}: "
            f"{_mib(needed - budget)} is missing; {hint}, or accept shorter requests with --max-model-len"
        )
    return min(budget // block_bytes, max_num_seqs * one_request + 1)


def allocate_cache(
    plan: CachePlan, num_blocks: int, dtype: torch.dtype, device: torch.device, shared: int | None = None
) -> torch.Tensor:
    """Allocates the KV cache tensor, all zero. On a CPU a page takes memory only once it is written. `shared` is a descriptor of memory
    that other processes map, too, and that is large enough."""
    shape = plan.shape(num_blocks)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    length = int(np.prod(shape)) * dtype.itemsize
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype)
    if shared is not None:
        region = mmap.mmap(shared, length)
    else:
        region = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no huge pages for the KV cache: %s", error)
    # The tensor owns the region: it holds the only reference, and the region is unmapped with it.
    return torch.frombuffer(region, dtype=dtype).view(shape)


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB" if size >= 10 * _MIB else f"{size / _MIB:,.2f} MiB"
