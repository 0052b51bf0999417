"""vLLM's arguments from Tandem's settings, and which of these vLLM lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SchedulingPolicy
from tandem.engine.model.content import weight_files
from tandem.engine.model.source import ModelSource
from tandem.machine.resources import free_memory

# The settings of each section that mean the same here. Any other must keep its default.
_TAKEN: dict[str, tuple[type[msgspec.Struct], tuple[str, ...]]] = {
    "model": (
        ModelConfig,
        ("path", "revision", "served_name", "dtype", "device", "threads", "engine", "engine_args", "engine_python", "adapters",
         "max_lora_rank"),
    ),
    "cache": (CacheConfig, ("memory_bytes", "memory_share", "prefix_caching", "tell_routers", "events")),
    "scheduler": (
        SchedulerConfig,
        ("policy", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold", "chunked_prefill",
         "max_loras"),
    ),
}  # fmt: skip
# What would be right instead of a setting that vLLM lacks, where there is something.
_INSTEAD = {
    "model.exact": "leave it out; vLLM's own mode is VLLM_BATCH_INVARIANT, an environment variable of the pools",
    "cache.block_size": "set model.engine_args: {block_size: 64}",
    "cache.dtype": "set model.engine_args: {kv_cache_dtype: fp8}",
    "scheduler.num_speculative_tokens": "set model.engine_args: {speculative_config: {...}}",
    "scheduler.async_scheduling": "set model.engine_args: {async_scheduling: true}",
}
# Arguments that follow from Tandem's settings, and those that a node needs as they are.
_SET_BY = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "max_model_len": "scheduler.max_model_len",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "scheduling_policy": "scheduler.policy",
    "enable_prefix_caching": "cache.prefix_caching",
    "kv_cache_memory_bytes": "cache.memory_bytes",
    "gpu_memory_utilization": "cache.memory_share",
    "kv_events_config": "cache.events",
    "enable_lora": "scheduler.max_loras",
    "max_loras": "scheduler.max_loras",
    "max_lora_rank": "model.max_lora_rank",
}
_OURS = {
    "scheduler_cls": "the node's loop counts what its scheduler does",
    "disable_log_stats": "the node reports what vLLM counts",
    "structured_outputs_config": "routers write grammars for one backend",
    "skip_tokenizer_init": "grammars need the tokenizer",
    "runner": "a node with this engine generates text",
    "convert": "a node with this engine generates text",
    "max_cpu_loras": "the node says which adapters are forgotten",
    "kv_transfer_config": "nodes hand KV over by Tandem's own connector",
    "data_parallel_size": "more nodes do that: set pools.aggregated.nodes",
}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that a slot of an adapter may have
_ALL_ADAPTERS = 1 << 20  # that vLLM keeps by itself: all that the node has not forgotten


def refusals(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    path = Path(engine.model.path).expanduser()
    if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").is_file()):
        yield ("model.path", "is a GGUF file, and vLLM reads folders as transformers writes them: name such a folder")
    for section, (kind, taken) in _TAKEN.items():
        given, default = getattr(engine, section), kind()
        for field in kind.__struct_fields__:
            if field not in taken and getattr(given, field) != getattr(default, field):
                name = f"{section}.{field}"
                yield name, f"is set, but vLLM has no such setting: {_INSTEAD.get(name, 'leave it out')}"
    if engine.scheduler.policy is SchedulingPolicy.CONTINUUM:
        yield "scheduler.policy", "is continuum, and vLLM keeps no turns: set fcfs or priority"
    if engine.scheduler.max_loras and engine.model.max_lora_rank > _RANKS[-1]:
        yield "model.max_lora_rank", f"is {engine.model.max_lora_rank}, and vLLM takes ranks up to {_RANKS[-1]}"
    for name in engine.model.engine_args:
        if name in _SET_BY:
            yield ("model.engine_args", f"has {name}, which follows from Tandem's settings: set {_SET_BY[name]}")
        elif name in _OURS:
            yield "model.engine_args", f"has {name}, which Tandem sets: {_OURS[name]}"


def arguments(config: EngineConfig, model: ModelConfig, source: ModelSource) -> dict[str, Any]:
    """The arguments of vLLM's EngineArgs, besides those that only vLLM's own classes can make."""
    cache, scheduler = config.cache, config.scheduler
    return {
        "model": str(source.folder),
        "served_model_name": source.name,
        "dtype": model.dtype,
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "enable_chunked_prefill": scheduler.chunked_prefill,
        "scheduling_policy": "priority" if scheduler.policy is SchedulingPolicy.PRIORITY else "fcfs",
        "enable_prefix_caching": cache.prefix_caching,
        "max_logprobs": -1,
        "generation_config": "vllm",
        "disable_log_stats": True,
        **_memory(cache, model, source),
        **_adapters(scheduler.max_loras, model.max_lora_rank),
        **model.engine_args,
    }


def _adapters(slots: int, rank: int) -> dict[str, Any]:
    if not slots:
        return {}
    fitting = next(each for each in _RANKS if each >= rank)
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": fitting, "max_cpu_loras": _ALL_ADAPTERS}


def _memory(cache: CacheConfig, model: ModelConfig, source: ModelSource) -> dict[str, Any]:
    """The bytes are the node's, and vLLM wants to know those of each rank."""
    ranks = max(1, math.prod(model.engine_args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")))
    share = cache.share_on(model.device)
    if cache.memory_bytes is not None:
        return {"kv_cache_memory_bytes": cache.memory_bytes // ranks}
    if model.device.startswith("cuda"):
        return {"gpu_memory_utilization": share}
    weights = sum(file.stat().st_size for file in weight_files(source))
    return {"kv_cache_memory_bytes": int(share * max(0, free_memory() - weights)) // ranks}


def environment(device: str) -> Mapping[str, str]:
    """Variables that vLLM reads when it is imported, for a node whose environment does not set them."""
    gpu = device.partition(":")[2]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its executor in this process, which on CPUs it would not choose itself
        "VLLM_CONFIGURE_LOGGING": "0",  # its log lines are this process's
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        **({"CUDA_VISIBLE_DEVICES": gpu} if device.startswith("cuda") and gpu else {}),
    }
