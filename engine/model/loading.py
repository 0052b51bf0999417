"""Loads a model and makes a runner that is ready for its first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import msgspec
import torch

from tandem.base.errors import ConfigurationError
from tandem.base.progress import with_amount
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.attention.layers import CachePlan, plan_cache
from tandem.engine.model.capabilities import Capability, ModelLoad, first_of
from tandem.engine.model.checkpoint import choose_device, choose_dtype, eos_tokens, fp8_on, read_config
from tandem.engine.model.content import ModelContent, content_of
from tandem.engine.model.context import context_length
from tandem.engine.model.embeds import EmbeddedPrompts
from tandem.engine.model.loaded import ForwardShape, LoadedModel
from tandem.engine.model.memory import allocate_cache, size_block_pool
from tandem.engine.model.paths import load_general, load_native
from tandem.engine.model.runner import ModelInfo
from tandem.engine.model.shard import Shard
from tandem.engine.model.source import ModelSource, Progress, find_source
from tandem.engine.model.staging import on
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wings import capabilities_for
from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tandem.machine.resources import usable_cores

log = logging.getLogger(__name__)

_TELL_S = 1.0


def load_runner(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    progress: Progress | None = None,
    *,
    native: bool = True,
    shard: Shard | None = None,
) -> TorchRunner:
    """Loads a model and makes its KV cache. Calls `progress` with what is being done and the share that is done.

    Without `native` every model takes the general path, so that the two paths can be compared. With a `shard` this process is one
    of several ranks, which must all load at the same time; it returns that rank's runner, and rank 0's leads the others. Raises a
    ConfigurationError for what an operator can change: the model, its type, memory.
    """
    tell = progress or (lambda _what, _share: None)
    tell("reading the model's configuration", 0.0)
    source = find_source(model.path)
    device = choose_device(model.device)
    config = read_config(source)
    dtype = choose_dtype(model.dtype, source, config)
    threads = bind_threads(model.threads)
    tell("loading weights", 0.0)
    content = _read_content(source, tell) if shard is None or shard.rank == 0 else None
    loading = ModelLoad(model, cache, scheduler, source, config, dtype, device, threads, tell, content, native, shard)
    capabilities = capabilities_for(loading)
    slower = ""
    if (shard is None or shard.stages == 1) and not any(each.unchanged for each in capabilities):
        slower = _compile_kernels(device, dtype, tell)
    loaded = _load(loading, capabilities)
    kv_dtype = _kv_dtype(loading, loaded)
    plan = plan_cache(loaded.layers, cache.block_size, loaded.states, kv_dtype)
    share = plan.share_of(loaded.of_stage) if loaded.of_stage is not None else None
    if share is not None:
        plan = plan.of_share(share)
    for each in capabilities:
        each.planned(loaded, plan)
    max_model_len = context_length(config, scheduler.max_model_len)
    shape = ForwardShape(scheduler.max_num_seqs, max_model_len, cache.block_size)
    num_blocks = _num_blocks(loading, capabilities, loaded, plan, kv_dtype, shape)
    with on(device), _cache_left_room():
        shared = shard.kv_memory if shard is not None else None
        kv_cache = allocate_cache(plan, num_blocks, kv_dtype, device, shared)
        for each in capabilities:
            each.connect()
        forward = loaded.use_cache(kv_cache, plan, shape)
        for each in capabilities:
            forward = each.leading(forward, loaded)
        parts = [part for each in capabilities for part in each.start(num_blocks, shape)]
    identity = content() if content is not None else ModelContent("", "")
    info = _described(loading, loaded, plan, max_model_len, num_blocks, identity)
    info = msgspec.structs.replace(info, layers=share, slower=slower)
    for each in capabilities:
        info = each.complete(info)
    runner = TorchRunner(
        info,
        kv_cache,
        forward,
        block_size=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        num_speculative_tokens=scheduler.num_speculative_tokens,
        masks=first_of(each.masks for each in capabilities),
        adapters=first_of(each.adapters for each in capabilities),
        parts=[EmbeddedPrompts(device), *parts] if info.embed_size else parts,
        drafter=first_of(each.drafter for each in capabilities),
    )
    tell("ready", 1.0)
    return runner


def _load(loading: ModelLoad, capabilities: Sequence[Capability]) -> LoadedModel:
    """Loads the model by the native library if it may be, and otherwise by transformers."""
    reasons = list(_against_native(loading, capabilities))
    if not reasons:
        loaded = load_native(loading, capabilities)
        if isinstance(loaded, LoadedModel):
            return loaded
        reasons.append(loaded)
    for why in reasons:
        log.info("%s is computed by transformers: %s", loading.source.name, why)
    for each in capabilities:
        each.on_general_path(" and ".join(reasons))
    return load_general(loading, capabilities)


def _against_native(loading: ModelLoad, capabilities: Sequence[Capability]) -> Iterator[str]:
    """Yields each reason why the native library may not compute the model, whatever the model is."""
    if not loading.native:
        yield "the caller asked for it"
    yield from (each.general for each in capabilities if each.general)
    if loading.shard is not None:
        yield "the node has several ranks"
    if loading.cache.dtype != "auto":
        yield f"cache.dtype is {loading.cache.dtype}, and the native library keeps KV only in the model's own type"


def _kv_dtype(loading: ModelLoad, loaded: LoadedModel) -> torch.dtype:
    if loading.cache.dtype == "auto":
        return loaded.dtype
    if any(layer.latent for layer in loaded.layers):
        raise ConfigurationError(
            f"cache.dtype is fp8, and {loading.source.name} keeps one latent of a token for all its heads, which eight bits would "
            "spoil: leave it at auto"
        )
    return fp8_on(loading.device)


def _num_blocks(
    loading: ModelLoad,
    capabilities: Sequence[Capability],
    loaded: LoadedModel,
    plan: CachePlan,
    kv_dtype: torch.dtype,
    shape: ForwardShape,
) -> int:
    """How many blocks the KV cache gets, with the same number on all ranks."""
    cache, scheduler, shard = loading.cache, loading.scheduler, loading.shard
    beside = 0
    if loaded.beside_cache is not None:
        loading.progress("measuring a step's memory", 0.0)
        tokens = scheduler.max_num_batched_tokens
        with on(loading.device), _cache_left_room():
            beside = loaded.beside_cache(shape, tokens)
            beside += sum(each.beside_cache(shape, tokens) for each in capabilities)
    together = shard is not None and shard.kv_memory is not None
    num_blocks = size_block_pool(
        plan,
        cache if shard is None or together else _of_rank(cache, plan.elements_per_block, shard),
        dtype=kv_dtype,
        device=loading.device,
        max_model_len=shape.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        tokens_per_step=scheduler.max_num_batched_tokens,
        beside=beside,
        more_per_block=sum(each.bytes_per_block for each in capabilities),
        mapped=loaded.weight_bytes if loaded.shares_weights else 0,
    )
    if shard is not None:
        num_blocks = shard.least(num_blocks)
        if shard.kv_memory is not None:
            os.ftruncate(shard.kv_memory, num_blocks * plan.elements_per_block * kv_dtype.itemsize)
    return num_blocks


def _described(
    loading: ModelLoad,
    loaded: LoadedModel,
    plan: CachePlan,
    max_model_len: int,
    num_blocks: int,
    identity: ModelContent,
) -> ModelInfo:
    return ModelInfo(
        name=loading.model.served_name or loading.source.name,
        content=identity.digest,
        tokenizer=identity.tokenizer,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loading.device),
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_tokens(loading.source, loading.config),
        num_layers=len({layer for group in plan.all_groups for layer in group.layers}),
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        groups=plan.all_groups,
        num_blocks=num_blocks,
        embed_size=loaded.embed_size,
        heads=loaded.heads,
        weight_bytes=loaded.weight_bytes,
        shares_weights=loaded.shares_weights,
    )


def _of_rank(cache: CacheConfig, elements: int, shard: Shard) -> CacheConfig:
    """This rank's share of `cache.memory_bytes`, because each rank keeps its part of every block. `elements` is the size of this
    rank's part of a block; a stage with more layers has a larger one."""
    if cache.memory_bytes is None:
        return cache
    share = cache.memory_bytes * elements // shard.total(elements)
    return msgspec.structs.replace(cache, memory_bytes=max(1 << 20, share))


def _compile_kernels(device: torch.device, dtype: torch.dtype, tell: Progress) -> str:
    """Makes the native library ready, which each machine compiles once. Returns why this node computes without it; "" if it does not."""
    if device.type != "cpu" or dtype not in library.DTYPES:
        return ""
    try:
        library.load(tell)
    except BuildFailed as error:
        slower = f"it computes without the native library, several times slower: {' '.join(str(error).split())[:300]}"
        log.warning("%s", slower)
        return slower
    return ""


def _read_content(source: ModelSource, tell: Progress) -> Callable[[], ModelContent]:
    """Begins to hash the model's content in a thread while the weights are loaded, because both read the same file pages. Returns a
    function that waits for the content."""
    read: list[int] = []  # bytes, from several threads
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model-content")
    content = reader.submit(content_of, source, read.append)
    reader.shutdown(wait=False)

    def wait_for_it() -> ModelContent:
        while not content.done():
            tell(with_amount("reading the weights to know them again", sum(read)), 0.0)
            wait([content], _TELL_S)
        return content.result()

    return wait_for_it


@contextmanager
def _cache_left_room() -> Iterator[None]:
    """Translates an OutOfMemoryError: the KV cache left too little of the device for attention's workspace and recorded steps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the device's memory does not hold what lies beside the KV cache: {str(error).partition('. ')[0]}; give the "
            "cache less with --kv-memory or cache.memory_share"
        ) from error


def bind_threads(threads: int) -> int:
    """Sets the number of torch's threads and returns it: `threads`, or one per usable core when it is 0."""
    count = threads if threads > 0 else usable_cores()
    torch.set_num_threads(count)
    return count
