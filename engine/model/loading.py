"""From configuration to a runner that is ready for its first step."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.model.attention.layers import CachePlan, plan_cache
from engine.model.checkpoint import (
    Progress,
    context_length,
    eos_tokens,
    find_source,
    load_model,
    pick_device,
)
from engine.model.forward import Forward
from engine.model.memory import allocate_cache, size_block_pool
from engine.model.probe import probe_attention
from engine.model.runner import ModelInfo
from engine.model.threads import bind_threads
from engine.model.torch_runner import TorchRunner
from engine.model.transformers_forward import TransformersForward

log = logging.getLogger(__name__)


def load_runner(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, progress: Progress | None = None
) -> TorchRunner:
    """Load a model and set up its KV cache. `progress` is told what is being done, and how much of it is.

    Raises ConfigurationError, in a sentence, for what the operator can change: the model, its kind, memory.
    """
    tell = progress or (lambda _what, _share: None)
    tell("reading the model's configuration", 0.0)
    source = find_source(model.path)
    device = pick_device(model.device)
    threads = bind_threads(model.threads)
    loaded = load_model(source, model, device, tell)
    tell("checking the model's attention", 0.0)
    probed = probe_attention(loaded)
    max_model_len = context_length(loaded.config, scheduler.max_model_len)
    plan = plan_cache(probed.layers, cache.block_size)
    dtype: torch.dtype = loaded.dtype
    num_blocks = size_block_pool(
        plan,
        cache,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        tokens_per_step=scheduler.max_num_batched_tokens,
    )
    kv_cache = allocate_cache(plan, num_blocks, dtype, device)
    info = ModelInfo(
        name=model.served_name or source.name,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=probed.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_tokens(loaded),
        num_layers=len(probed.layers),
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        groups=plan.groups,
        num_blocks=num_blocks,
    )
    forward = choose_forward(loaded, kv_cache, plan, threads)
    tell("ready", 1.0)
    return TorchRunner(
        info,
        kv_cache,
        forward,
        block_size=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        num_speculative_tokens=scheduler.num_speculative_tokens,
    )


def choose_forward(model: PreTrainedModel, kv_cache: torch.Tensor, plan: CachePlan, threads: int) -> Forward:
    return TransformersForward(model, kv_cache, plan)
