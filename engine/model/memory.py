"""How much memory there is, and how many KV cache blocks fit into it."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import numpy as np
import torch

from engine.config import CacheConfig
from engine.model.attention.layers import CachePlan
from wire.errors import ConfigurationError

log = logging.getLogger(__name__)

# On a CPU the cache shares the machine with everything else that runs there, so it takes no more than this
# unasked (or than one request of full length needs, if that is more).
CPU_CAP_BYTES = 4 << 30

_MIB = 1 << 20


def available_bytes(device: torch.device) -> int:
    """What could be allocated now without pushing anybody out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_available(), _cgroup_available())


def size_block_pool(
    plan: CachePlan,
    cache: CacheConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
    tokens_per_step: int,
) -> int:
    """Blocks in the pool, the null block included. Never more than all sequences at full length can use."""
    block_bytes = plan.elements_per_block * dtype.itemsize
    one_request = plan.blocks_for(max_model_len, tokens_per_step)
    needed = (one_request + 1) * block_bytes
    free = available_bytes(device)
    if cache.memory_bytes is not None:
        if cache.memory_bytes > free:
            raise ConfigurationError(
                f"--kv-memory asks for {_mib(cache.memory_bytes)}, but only {_mib(free)} is free: "
                f"{_mib(cache.memory_bytes - free)} is missing"
            )
        budget = cache.memory_bytes
        hint = "raise --kv-memory"
    else:
        budget = int(free * cache.memory_share)
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
    plan: CachePlan, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The KV cache tensor, all zero. On a CPU a page takes memory only once it is written."""
    shape = plan.shape(num_blocks)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    length = int(np.prod(shape)) * dtype.itemsize
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no huge pages for the KV cache: %s", error)
    # The tensor holds the only reference to the region, which is unmapped with it.
    return torch.frombuffer(region, dtype=dtype).view(shape)


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_available() -> int:
    """The tightest limit of this process's control group and those above it, less what counts against it."""
    tightest = 1 << 62
    for group in _memory_groups():
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        tightest = min(tightest, max(0, limit - used + _reclaimable(group)))
    return tightest


def _memory_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        inner = root / path.lstrip("/")
        groups.extend(
            [inner, *(parent for parent in inner.parents if parent == root or root in parent.parents)]
        )
    return groups


def _reclaimable(group: Path) -> int:
    """Files read and not in use: the kernel drops them before it refuses memory."""
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _number(*paths: Path) -> int | None:
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB" if size >= 10 * _MIB else f"{size / _MIB:,.2f} MiB"
