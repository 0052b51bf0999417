"""Chooses how a model is computed: by the native library if it knows the model, otherwise by transformers (the general path)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.native.architecture import describe
from tandem.engine.model.native.forward import NativeLlamaForward, supports
from tandem.engine.model.quantized.formats import read_checkpoint
from tandem.engine.model.runner import Forward
from tandem.engine.model.source import ModelSource, Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.attention.flashinfer import FlashInferAttention
    from tandem.engine.model.attention.flashinfer_latents import FlashInferLatents
    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.fused.pieces import Pieces
    from tandem.engine.model.hidden_states import ObservedLayers
    from tandem.engine.model.lora.layers import AdaptedLayers
    from tandem.engine.model.lora.slots import AdapterSlots
    from tandem.engine.model.recurrent.layout import StateLayout
    from tandem.engine.model.transformers_forward import ModelParts
    from tandem.engine.model.vision.tower import VisionTower
    from tandem.engine.model.wide.shard import Shard
    from tandem.kvtransfer.base import HeadShare

log = logging.getLogger(__name__)


_SHORT_PROMPT = 512  # tokens


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """The largest step that a forward pass may get."""

    max_requests: int
    max_model_len: int
    block_size: int = 16


@dataclasses.dataclass(frozen=True)
class AdapterRoom:
    """How many different adapters a step may have, and their highest rank."""

    slots: int
    rank: int


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are loaded and which has no KV cache yet."""

    layers: tuple[AttentionLayer, ...]  # the layers that attend
    vocab_size: int
    dtype: torch.dtype
    use_cache: Callable[[torch.Tensor, CachePlan, ForwardShape], Forward]
    # The bytes on the device that a step of the given number of tokens takes besides the KV cache, with libraries' workspaces.
    # None on a CPU, where memory is taken and given back as needed.
    beside_cache: Callable[[ForwardShape, int], int] | None = None
    states: StateLayout | None = None  # the recurrent states of layers that do not attend
    vector_size: int = 0  # numbers in a hidden state
    embed_size: int = 0  # numbers in a token's embedding, if other rows may replace it; 0: they may not
    generates: bool = True  # False: the checkpoint has no head, so the logits mean nothing
    adapters: AdapterSlots | None = None  # None: no adapters are served
    tower: VisionTower | None = None  # None: the model reads no images
    # None: hidden states are neither written to files nor read by an EAGLE-3 head.
    observed: ObservedLayers | None = None
    heads: HeadShare | None = None  # the KV heads that a rank with a cache of its own keeps; None: all
    of_stage: frozenset[int] | None = None  # the layers of this rank's stage; None: all


def load_native(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    progress: Progress,
    may_lack_head: bool = False,
) -> LoadedModel | None:
    """Loads the model into the native library. Returns None, and logs why, if the library does not know the model or cannot be
    compiled."""
    quantized = source.gguf_file is None and read_checkpoint(source.name, source.folder, config) is not None
    plain = config
    if quantized:  # on a CPU quantized matrices become ordinary ones
        plain = copy.deepcopy(config)
        plain.quantization_config = None
    reason = supports(plain, dtype, device)
    if reason is not None:
        log.info("%s is computed by transformers, not by the native library: %s", source.name, reason)
        return None

    def tell(share: float) -> None:
        progress("loading weights", share)

    if source.gguf_file is None and not quantized:
        forward = NativeLlamaForward.from_checkpoint(
            source.folder, config, dtype=dtype, threads=threads, progress=tell, may_lack_head=may_lack_head
        )
    else:
        from tandem.engine.model.general import load_model

        module = load_model(source, config, dtype, device, progress)
        forward = NativeLlamaForward.from_module(module, threads=threads, release=True, progress=tell)
    # The library has its own threads on the same cores, and torch only samples, so torch gets one thread.
    torch.set_num_threads(1)

    def use_cache(kv_cache: torch.Tensor, plan: CachePlan, shape: ForwardShape) -> Forward:
        forward.use_cache(kv_cache, plan.groups)
        return forward

    return LoadedModel(
        _native_layers(plain),
        plain.vocab_size,
        dtype,
        use_cache,
        vector_size=plain.hidden_size,
        embed_size=plain.hidden_size,
        generates=forward.generates,
    )


def _native_layers(config: Any) -> tuple[AttentionLayer, ...]:
    """The layers as probing would find them. If the configuration lists no layer types, its window holds for all layers."""
    architecture = describe(config)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * architecture.layers
    return tuple(
        AttentionLayer(
            index=index,
            num_query_heads=architecture.heads,
            num_kv_heads=architecture.kv_heads,
            key_dim=architecture.head_dim,
            value_dim=architecture.head_dim,
            window=window if kind == "sliding_attention" else None,
        )
        for index, kind in enumerate(kinds)
    )


def load_general(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    progress: Progress,
    may_lack_head: bool = False,
    room: AdapterRoom | None = None,
    shard: Shard | None = None,
    observe: Sequence[int] = (),
) -> LoadedModel:
    """Loads the model with transformers. `room` is for adapters, if any are served. `shard` is this rank's part; all ranks must load
    at the same time. `observe` are layers whose hidden states are read: the model is then neither fused nor recorded."""
    # Imported here because the import takes seconds, which the native path does not need.
    from tandem.engine.model.attention.latents import gathering
    from tandem.engine.model.fused.find import fuse
    from tandem.engine.model.general import holds_head, load_model
    from tandem.engine.model.probe import probe_attention
    from tandem.engine.model.recurrent.layout import LayerStates
    from tandem.engine.model.transformers_forward import TransformersForward, run_without_attention
    from tandem.engine.model.vision.tower import find_tower, linear_weights_of_tower

    model = load_model(source, config, dtype, device, progress, may_lack_head=may_lack_head, shard=shard)
    generates = not may_lack_head or holds_head(source, model)
    progress("checking the model's attention", 0.0)
    if shard is not None and shard.stages > 1:
        from tandem.engine.model.wide.stages import check_stage

        check_stage(model, lambda: run_without_attention(model, 3, 3, device), shard)
    probed = probe_attention(model)
    parts = probed.parts
    mixers = parts.mixers
    if room is not None:
        _refuse_adapters(source, parts)
    layers = parts.layers
    heads = of_stage = None
    if shard is not None:
        from tandem.engine.model.wide.cut import heads_kept, place_heads

        _refuse_ranks(source, parts)
        if shard.kv_memory is not None:
            layers = place_heads(source.name, model, layers, shard.of_stage())
        else:
            heads = heads_kept(source.name, model, layers, shard.of_stage())
        if shard.stages > 1:
            from tandem.engine.model.wide.stages import heads_of_all, layers_of_all

            if shard.kv_memory is None:
                of_stage = frozenset(layer.index for layer in layers)
                heads = heads_of_all(heads, shard)
            layers = layers_of_all(layers, shard)
    # If a layer attends by its own code, or reads another layer's keys, fused pieces cannot be tried in the whole model. A GPU's
    # pieces need a step's rows in one sequence, which mixers take apart.
    alone = bool(parts.own) or any(layer.reads_of is not None for layer in parts.layers)
    # No fusion with several ranks: each would try it by itself, and one that has to reload would leave the others waiting.
    fusable = not alone and shard is None and not observe and (mixers is None or device.type == "cpu")
    pieces = pieces_for(device, model.dtype, threads) if fusable else None
    mixing_threads = 0
    adapted = _find_adapted(model, room, pieces)
    if pieces is not None:
        fused = fuse(model, pieces, adapted)
        if fused is None:
            log.warning(
                "%s is computed without fusion, which is slower: its fused parts do not give what it gives",
                source.name,
            )
            model = load_model(source, config, dtype, device, progress, may_lack_head=may_lack_head)
            pieces, parts = None, probe_attention(model).parts
            mixers = parts.mixers
            adapted = _find_adapted(model, room, pieces)
        elif pieces.copies and (fused.left - linear_weights_of_tower(model)) * 10 < sum(
            weight.numel() for weight in model.parameters()
        ):
            # The kernels have their own threads on the same cores. Torch does little besides, except for mixers' long chunks.
            torch.set_num_threads(1)
            mixing_threads = threads if mixers is not None else 0

    adapters = None
    if adapted is not None:
        from tandem.engine.model.lora.slots import AdapterSlots

        adapted.take_place()
        adapters = AdapterSlots(adapted, model.dtype, device)

    def use_cache(kv_cache: torch.Tensor, plan: CachePlan, shape: ForwardShape) -> Forward:
        from tandem.engine.model.attention.cpu import CpuAttention
        from tandem.engine.model.recorded_steps import RecordedSteps

        if alone or mixers is not None:
            # Only gathering handles layers that attend by their own code or not at all. Such steps take their rows apart, so they
            # are not recorded.
            states = LayerStates(kv_cache, mixers.layout) if mixers is not None else None
            return TransformersForward(
                model, gathering(kv_cache, plan, parts.expansions), parts, states, adapted, mixing_threads
            )
        attention = _choose_attention(kv_cache, plan, parts, shape, pieces, model.dtype)
        forward = TransformersForward(model, attention, parts, adapted=adapted)
        if isinstance(attention, CpuAttention):
            return RecordedSteps(forward, attention)
        # A pipeline stage receives and sends within a step, which a recording cannot.
        if device.type != "cuda" or observe or (shard is not None and shard.stages > 1):
            return forward
        from tandem.engine.model.decode_graphs import CudaRecorder, DecodeGraphs

        graphs = DecodeGraphs(
            forward,
            CudaRecorder(device),
            num_groups=len(plan.groups),
            block_size=plan.block_size,
            max_tokens=recorded_tokens(shape),
            device=device,
            shard=shard,
        )
        with torch.inference_mode():
            graphs.record_ahead(lambda share: progress("recording decode steps", share))
        return graphs

    def beside_cache(shape: ForwardShape, tokens: int) -> int:
        from tandem.engine.model.attention import flashinfer
        from tandem.engine.model.decode_graphs import memory_of_graphs
        from tandem.engine.model.transformers_forward import peak_of_step

        # The sampler holds float32 logits, the restricted logits, and its noise.
        sampling = 3 * 4 * shape.max_requests * probed.vocab_size
        step = peak_of_step(model, tokens, shape.max_requests, device)
        recorded = memory_of_graphs(recorded_tokens(shape), probed.vocab_size, model.dtype.itemsize)
        listed = flashinfer.bytes_of_pages(
            parts.layers, recorded_tokens(shape), shape.max_model_len, shape.block_size
        )
        return step + sampling + recorded + listed + flashinfer.WORKSPACE_BYTES

    on_device = beside_cache if device.type == "cuda" else None
    layout = mixers.layout if mixers is not None else None
    return LoadedModel(
        layers,
        probed.vocab_size,
        model.dtype,
        use_cache,
        on_device,
        layout,
        vector_size=int(model.config.get_text_config().hidden_size),
        embed_size=_embed_size(model) if shard is None else 0,  # other ranks get only token ids
        generates=generates,
        adapters=adapters,
        tower=find_tower(source, model, threads),
        observed=_observed(source, model, observe),
        heads=heads,
        of_stage=of_stage,
    )


def _find_adapted(
    model: PreTrainedModel, room: AdapterRoom | None, pieces: Pieces | None
) -> AdaptedLayers | None:
    """The layers that adapters may change; None without adapters. Call it before any of the model's layers is replaced."""
    if room is None:
        return None
    from tandem.engine.model.fused.cpu import CpuPieces
    from tandem.engine.model.lora.layers import find_layers
    from tandem.engine.model.transformers_forward import run_without_attention

    return find_layers(
        model,
        lambda tokens: run_without_attention(model, tokens, 1, model.device),
        slots=room.slots,
        rank=room.rank,
        kernels=pieces if isinstance(pieces, CpuPieces) else None,
    )


def _observed(source: ModelSource, model: PreTrainedModel, numbers: Sequence[int]) -> ObservedLayers | None:
    from tandem.engine.model.hidden_states import ObservedLayers

    return ObservedLayers(source.name, model, numbers) if numbers else None


def _embed_size(model: Any) -> int:
    """The size of an embedding; 0 if the model also needs the token ids themselves, so that rows cannot replace embeddings."""
    asks_tokens = bool(getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0))
    if asks_tokens or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return 0
    return int(getattr(model.get_input_embeddings(), "embedding_dim", 0))


def _refuse_adapters(source: ModelSource, parts: ModelParts) -> None:
    if parts.mixers is not None:
        why = "keeps recurrent states, whose layers are computed request by request"
    elif parts.own:
        why = "has layers that attend by their own code, request by request"
    elif parts.expansions:
        why = "keeps latents, whose matrices are not multiplied with every token"
    else:
        return
    raise ConfigurationError(
        f"{source.name} cannot be served with adapters: it {why}. Set scheduler.max_loras to 0, and merge the adapter into the "
        "model's weights"
    )


def _refuse_ranks(source: ModelSource, parts: ModelParts) -> None:
    if parts.mixers is not None:
        why = "keeps recurrent states"
    elif parts.own:
        why = "has layers that attend by their own code"
    elif parts.expansions:
        why = "keeps latents, which are one head for all"
    else:
        return
    raise ConfigurationError(
        f"{source.name} cannot be served on several ranks: it {why}. Set pools.<pool>.tensor_parallel to 1"
    )


def pieces_for(device: torch.device, dtype: torch.dtype, threads: int) -> Pieces | None:
    """The fused pieces for this device and dtype; None if the model is best left unchanged."""
    from tandem.engine.model.fused.cpu import cpu_pieces
    from tandem.engine.model.fused.device import DevicePieces

    if device.type == "cpu":
        return cpu_pieces(dtype, threads)
    try:
        from tandem.engine.model.fused.triton_ops import kernels

        kernels()
    except ImportError as error:
        log.warning("the model's small operations are not fused, which is slower: %s", error)
        return None
    return DevicePieces()


def recorded_tokens(shape: ForwardShape) -> int:
    """The longest step to record: all decodes that may run at once, and short prompts, whose time would go into launches."""
    return max(shape.max_requests, _SHORT_PROMPT)


def _choose_attention(
    kv_cache: torch.Tensor,
    plan: CachePlan,
    parts: ModelParts,
    shape: ForwardShape,
    pieces: Pieces | None,
    dtype: torch.dtype,
) -> PagedAttention:
    from tandem.engine.model.attention import cpu, flashinfer
    from tandem.engine.model.fused.cpu import CpuPieces

    if isinstance(pieces, CpuPieces):
        reason = cpu.reason_against(parts.layers, plan, kv_cache.dtype, dtype)
        if reason is None:
            return cpu.CpuAttention(pieces, kv_cache, plan, parts.layers)
        log.info("attention gathers blocks: %s", reason)

    library = flashinfer.find_library() if kv_cache.device.type == "cuda" else None
    return attention_with(library, kv_cache, plan, parts, shape, dtype)


def attention_with(
    library: Any | None,
    kv_cache: torch.Tensor,
    plan: CachePlan,
    parts: ModelParts,
    shape: ForwardShape,
    dtype: torch.dtype,
) -> PagedAttention:
    """Attention by FlashInfer if it is installed, computes this model's attention and runs here; otherwise by gathering."""
    from tandem.engine.model.attention import flashinfer, flashinfer_latents
    from tandem.engine.model.attention.latents import gathering

    layers, expansions = parts.layers, parts.expansions
    if library is not None:
        if expansions:
            reason = flashinfer_latents.reason_against(layers, expansions, dtype)
        else:
            reason = flashinfer.reason_against(layers, dtype)
        if reason is None:
            attention: FlashInferAttention | FlashInferLatents
            if expansions:
                attention = flashinfer_latents.FlashInferLatents(
                    library, kv_cache, plan, layers, expansions, shape.max_model_len
                )
            else:
                attention = flashinfer.FlashInferAttention(
                    library, kv_cache, plan, layers, shape.max_model_len, dtype
                )
            try:
                attention.try_out()
                return attention
            except Exception as error:  # the library's compiler and kernels may raise anything
                reason = f"flashinfer does not run here: {error}"
        log.warning("attention gathers blocks, which is slower: %s", reason)
    return gathering(kv_cache, plan, parts.expansions)
