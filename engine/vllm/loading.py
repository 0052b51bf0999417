"""Makes the engine: vLLM's configuration and core, its connectors, its adapters.

`load` must run before anything else imports vLLM: some of its settings are environment variables that it reads when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigurationError
from tandem.base.progress import Report
from tandem.engine.config import EngineConfig, ModelConfig
from tandem.engine.model.checkpoint import eos_tokens
from tandem.engine.model.content import content_of
from tandem.engine.model.runner import ModelInfo
from tandem.engine.model.source import ModelSource, find_source
from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.handover import Handover
from tandem.engine.vllm.layout import VllmCache
from tandem.engine.vllm.ranks import check_ranks
from tandem.engine.vllm.settings import arguments, environment
from tandem.engine.wings import Connect

if TYPE_CHECKING:
    from tandem.engine.vllm.adapters import VllmAdapter


def load(config: EngineConfig, model: ModelConfig, progress: Report, connect: Connect | None) -> VllmEngine:
    source = find_source(model.path)
    if source.gguf_file is not None:
        raise ConfigurationError(
            f"{source.name} is a GGUF file, and vLLM reads folders as transformers writes them: name such a folder with model.path"
        )
    for name, value in environment(model.device).items():
        os.environ.setdefault(name, value)
    adapters = _read_adapters(model, progress) if config.scheduler.max_loras else None
    progress("importing vLLM", 0.0)
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMError
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from tandem.engine.vllm.figures import watch
    from tandem.engine.vllm.requests import GRAMMARS

    progress("reading the weights to know them again", 0.0)
    content = content_of(source)
    progress("loading the model into vLLM", 0.1)
    try:
        made = EngineArgs(
            **arguments(config, model, source),
            structured_outputs_config={"backend": GRAMMARS},
            kv_events_config=KVEventsConfig(enable_kv_cache_events=config.cache.prefix_caching, publisher="null"),
        ).create_engine_config()
        _check_experts(made)
        # Its KV, its numbers and its noise are not those of another engine, so no request goes on there.
        identity = hashlib.sha256(f"vllm {content.digest}".encode()).hexdigest()
        handover = _handover(made, identity, connect) if connect is not None else None
        core = EngineCore(made, Executor.get_class(made), log_stats=False)
        watch(core.scheduler)
        if handover is not None and handover.has_ranks:
            from tandem.engine.vllm.connector import RanksOutput

            core.model_executor.kv_output_aggregator = RanksOutput(handover)
    except (VLLMError, ValueError, TypeError, NotImplementedError, OSError) as error:
        raise ConfigurationError(f"vLLM does not load {source.name}: {error}") from error
    book = None
    if adapters is not None:
        from tandem.engine.vllm.adapters import VllmAdapters

        book = VllmAdapters(core, model.max_lora_rank)
        book.serve(adapters)
    progress("ready", 1.0)
    layout = VllmCache(core.scheduler.kv_cache_config)
    info = _described(core, source, identity, content.tokenizer, layout)
    return VllmEngine(core, info, layout.group_of, handover, book)


def _read_adapters(model: ModelConfig, progress: Report) -> list[VllmAdapter]:
    """Before the model, which takes minutes: an adapter that cannot be read is known then."""
    from tandem.engine.vllm.adapters import read_adapter

    progress("reading the adapters", 0.0)
    return [read_adapter(name, Path(folder), model.max_lora_rank) for name, folder in model.adapters.items()]


def _check_experts(made: Any) -> None:
    if made.device_config.device_type == "cpu" and made.lora_config is not None and made.model_config.is_moe:
        raise ConfigurationError(
            "vLLM computes experts with Triton where adapters are served, and CPUs lack it: set scheduler.max_loras to 0, or "
            "model.engine to tandem"
        )


def _handover(made: Any, identity: str, connect: Connect) -> Handover:
    """Tells vLLM where to find its two connectors, which meet the halves of the node's in this process."""
    from vllm.config import KVTransferConfig

    from tandem.engine.vllm import connector

    model, cache = made.model_config, made.cache_config
    check_ranks(made)
    heads, inside = 0, os.environ.get("VLLM_KV_CACHE_LAYOUT", "")
    if made.device_config.device_type == "cpu":
        # vLLM's attention on CPUs finds a block by its stride, so the layers of one may lie side by side.
        cache.kv_cache_layout = "BLHNC"
        heads = 0 if model.use_mla else model.get_total_num_kv_heads()
        inside = _on_cpus(made)
    handover = Handover(connect, made.parallel_config.world_size, heads)
    handover.identity = f"{identity} {_as_computed(model)} {inside}"
    handover.vocab_size = model.get_vocab_size()
    made.kv_transfer_config = KVTransferConfig(
        kv_connector=connector.NAME,
        kv_connector_module_path=connector.__name__,
        kv_connector_extra_config=handover.told,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    return handover


def _as_computed(model: Any) -> str:
    """What `engine_args` made of the model's files: one pool may have other arguments than the other."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}
    said = json.dumps([str(model.dtype), model.quantization, config], default=str, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _on_cpus(made: Any) -> str:
    """Returns what decides how the inside of a block is kept."""
    model, cache = made.model_config, made.cache_config
    if model.use_mla:
        from tandem.engine.vllm.latents import write_by_strides

        return write_by_strides(made)
    from vllm.v1.attention.backends import cpu_attn

    return str(cpu_attn._get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def _described(core: Any, source: ModelSource, content: str, tokenizer: str, layout: VllmCache) -> ModelInfo:
    config, caches = core.vllm_config, core.scheduler.kv_cache_config
    model = config.model_config
    spec = caches.kv_cache_groups[0].kv_cache_spec if caches.kv_cache_groups else None
    return ModelInfo(
        name=source.name,
        content=content,
        tokenizer=tokenizer,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=eos_tokens(source, model.hf_config),
        num_layers=layout.num_layers,
        num_kv_heads=getattr(spec, "num_kv_heads", 0),
        head_dim=getattr(spec, "head_size", 0),
        groups=tuple(layout.groups),
        num_blocks=layout.num_blocks,
    )
