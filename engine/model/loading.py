"""Loads a model and makes a runner that is ready for its first step."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from tandem.base.errors import ConfigurationError
from tandem.base.progress import with_amount
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.attention.layers import plan_cache
from tandem.engine.model.checkpoint import (
    choose_device,
    choose_dtype,
    eos_tokens,
    fp8_on,
    read_config,
)
from tandem.engine.model.content import ModelContent, content_of
from tandem.engine.model.context import context_length
from tandem.engine.model.draft_loading import load_draft_model
from tandem.engine.model.eagle import EagleHead
from tandem.engine.model.memory import allocate_cache, size_block_pool
from tandem.engine.model.paths import AdapterRoom, ForwardShape, load_general, load_native
from tandem.engine.model.pooling import find_pooling
from tandem.engine.model.runner import ModelInfo
from tandem.engine.model.source import ModelSource, Progress, find_source
from tandem.engine.model.staging import on
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wide.forward import LeadingForward
from tandem.engine.model.wide.shard import Shard
from tandem.engine.structured.grammars import Grammars, tokenizer_json
from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tandem.machine.resources import usable_cores
from tandem.wire.pooling import VectorModel

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
    # The native path keeps KV only in the model's own dtype.
    own_kv = cache.dtype == "auto"
    pooling = find_pooling(model.pooling, source, config)
    headless = pooling is not None
    if shard is not None and shard.stages > 1 and pooling is not None:
        raise ConfigurationError(
            f"{source.name} makes vectors, which rank 0 reads below the model's head, and that is another stage's. Set "
            "pools.<pool>.pipeline_parallel to 1"
        )
    room = AdapterRoom(scheduler.max_loras, model.max_lora_rank) if scheduler.max_loras else None
    if room is not None and native:
        log.info("%s is computed by transformers: scheduler.max_loras asks for adapters", source.name)
    observe = model.hidden_states_layers if model.hidden_states_folder else ()
    layers: tuple[int, ...] = ()
    if model.draft and scheduler.num_speculative_tokens:
        from tandem.engine.model.eagle_loading import layers_read  # it needs transformers

        layers = layers_read(find_source(model.draft), config)
    if observe and layers:
        raise ConfigurationError(
            f"model.draft names {model.draft}, which reads other layers than model.hidden_states_layers: leave one of them out"
        )
    observe = observe or layers
    if observe and native:
        asks = "model.draft" if layers else "model.hidden_states_folder"
        log.info("%s is computed by transformers: %s asks for hidden states", source.name, asks)
    slower = _compile_kernels(device, dtype, tell) if shard is None and not observe else ""
    loaded = None
    if native and own_kv and room is None and shard is None and not observe:
        loaded = load_native(source, config, dtype, device, threads, tell, headless)
    if loaded is None:
        loaded = load_general(source, config, dtype, device, threads, tell, headless, room, shard, observe)
    if loaded.adapters is not None:
        read = []
        for place, (name, folder) in enumerate(model.adapters.items()):
            tell(f"reading the adapter {name}", place / len(model.adapters))
            read.append(loaded.adapters.read(name, Path(folder)))
        loaded.adapters.serve(read)
    kv_dtype = loaded.dtype if own_kv else fp8_on(device)
    if not own_kv and any(layer.latent for layer in loaded.layers):
        raise ConfigurationError(
            f"cache.dtype is fp8, and {source.name} keeps one latent of a token for all its heads, which eight bits would spoil: "
            "leave it at auto"
        )
    plan = plan_cache(loaded.layers, cache.block_size, loaded.states, kv_dtype)
    share = plan.share_of(loaded.of_stage) if loaded.of_stage is not None else None
    if share is not None:
        plan = plan.of_share(share)
    draft = None
    if model.draft and scheduler.num_speculative_tokens and loaded.generates:
        draft = load_draft_model(model, source, plan, loaded, device, threads, tell, native)
    max_model_len = context_length(config, scheduler.max_model_len)
    shape = ForwardShape(scheduler.max_num_seqs, max_model_len, cache.block_size)
    beside = 0
    if loaded.beside_cache is not None:
        tell("measuring a step's memory", 0.0)
        with on(device), _cache_left_room():
            beside = loaded.beside_cache(shape, scheduler.max_num_batched_tokens)
            if draft is not None:
                beside += draft.beside_cache(shape, scheduler.max_num_batched_tokens)
    together = shard is not None and shard.kv_memory is not None
    num_blocks = size_block_pool(
        plan,
        cache if shard is None or together else _of_rank(cache, plan.elements_per_block, shard),
        dtype=kv_dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        tokens_per_step=scheduler.max_num_batched_tokens,
        beside=beside,
        draft_bytes=draft.bytes_per_block if draft is not None else 0,
    )
    if shard is not None:
        num_blocks = shard.least(num_blocks)
        if shard.kv_memory is not None:
            os.ftruncate(shard.kv_memory, num_blocks * plan.elements_per_block * kv_dtype.itemsize)
    with on(device), _cache_left_room():
        shared = shard.kv_memory if shard is not None else None
        kv_cache = allocate_cache(plan, num_blocks, kv_dtype, device, shared)
        if shard is not None and shard.stages > 1:
            from tandem.engine.model.wide.stages import meet  # it needs transformers

            meet(shard, device)
        forward = loaded.use_cache(kv_cache, plan, shape)
        if shard is not None and shard.lead is not None:
            attending = [layer.index for layer in loaded.layers if layer.reads_of is None]
            forward = LeadingForward(forward, shard, shard.lead, attending)
        guesser = None
        if draft is not None:
            guesser = draft.with_cache(num_blocks, plan.all_groups, loaded.vocab_size, device, shape)
            log.info(
                "%s guesses for %s, with %d bytes of each block",
                draft.source.name,
                source.name,
                draft.bytes_per_block,
            )
    hidden_states = None
    if model.hidden_states_folder and loaded.observed is not None and (shard is None or shard.rank == 0):
        from tandem.engine.model.hidden_states import HiddenStates  # it needs transformers

        hidden_states = HiddenStates(loaded.observed, model.hidden_states_folder)
    identity = content() if content is not None else ModelContent("", "")
    info = ModelInfo(
        name=model.served_name or source.name,
        content=identity.digest,
        tokenizer=identity.tokenizer,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_tokens(source, config),
        num_layers=len({layer for group in plan.all_groups for layer in group.layers}),
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        groups=plan.all_groups,
        num_blocks=num_blocks,
        embed_size=loaded.embed_size,
        heads=loaded.heads,
        layers=share,
        reads_hidden=isinstance(guesser, EagleHead),
        images=loaded.tower.rules if loaded.tower is not None else None,
        image_row_size=loaded.tower.width if loaded.tower is not None else 0,
        vectors=VectorModel(pooling, loaded.vector_size, loaded.generates) if pooling is not None else None,
        slower=slower,
    )
    runner = TorchRunner(
        info,
        kv_cache,
        forward,
        block_size=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        num_speculative_tokens=scheduler.num_speculative_tokens,
        grammars=Grammars(functools.partial(tokenizer_json, source), info.vocab_size, info.eos_token_ids),
        adapters=loaded.adapters,
        tower=loaded.tower,
        draft_model=guesser,
        hidden_states=hidden_states,
    )
    tell("ready", 1.0)
    return runner


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
