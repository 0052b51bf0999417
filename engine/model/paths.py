"""Chooses how a model is computed: by the native library if it knows the model, otherwise by transformers (the general path)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.loaded import ForwardShape, LoadedModel
from tandem.engine.model.native.architecture import describe
from tandem.engine.model.native.forward import NativeLlamaForward, supports
from tandem.engine.model.runner import Forward
from tandem.engine.model.weight_formats import weight_format

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.adapters import UpdatedLayers
    from tandem.engine.model.attention.flashinfer import FlashInferAttention
    from tandem.engine.model.attention.flashinfer_latents import FlashInferLatents
    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.decode_graphs import DecodeGraphs
    from tandem.engine.model.fused.pieces import Pieces
    from tandem.engine.model.probe import ProbeResult
    from tandem.engine.model.transformers_forward import ModelParts, TransformersForward

log = logging.getLogger(__name__)


_SHORT_PROMPT = 512  # tokens


def load_native(loading: ModelLoad, capabilities: Sequence[Capability] = ()) -> LoadedModel | None:
    """Loads the model into the native library. Returns None, and logs why, if the library does not know the model or cannot be
    compiled."""
    source, config, dtype, threads = loading.source, loading.config, loading.dtype, loading.threads
    may_lack_head = any(each.may_lack_head for each in capabilities)
    found = weight_format(source, config)
    plain = found.plain(config) if found is not None else config
    reason = supports(plain, dtype, loading.device)
    if reason is not None:
        log.info("%s is computed by transformers, not by the native library: %s", source.name, reason)
        return None

    def tell(share: float) -> None:
        loading.progress("loading weights", share)

    if found is None:
        forward = NativeLlamaForward.from_checkpoint(
            source.folder, config, dtype=dtype, threads=threads, progress=tell, may_lack_head=may_lack_head
        )
    else:
        from tandem.engine.model.general import load_model

        module = load_model(source, config, dtype, loading.device, loading.progress)
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


def load_general(loading: ModelLoad, capabilities: Sequence[Capability] = ()) -> LoadedModel:
    """Loads the model with transformers. With a shard, all ranks must load at the same time."""
    # Imported here because the import takes seconds, which the native path does not need.
    from tandem.engine.model.general import holds_head
    from tandem.engine.model.probe import probe_attention

    may_lack_head = any(each.may_lack_head for each in capabilities)
    model = _load_with(loading, capabilities)
    generates = not may_lack_head or holds_head(loading.source, model)
    loading.progress("checking the model's attention", 0.0)
    for each in capabilities:
        each.check(model)
    probed = probe_attention(model)
    for each in capabilities:
        each.refuse(probed.parts)
    model, computed = _fused(loading, capabilities, model, probed)
    for each in capabilities:
        each.change(model)
    mixers = computed.parts.mixers
    loaded = LoadedModel(
        probed.parts.layers,
        probed.vocab_size,
        model.dtype,
        computed.use_cache,
        computed.beside_cache if loading.device.type == "cuda" else None,
        mixers.layout if mixers is not None else None,
        vector_size=int(model.config.get_text_config().hidden_size),
        embed_size=_embed_size(model) if loading.shard is None else 0,  # other ranks get only token ids
        generates=generates,
    )
    for each in capabilities:
        loaded = each.placed(loaded, model)
    return loaded


def _load_with(loading: ModelLoad, capabilities: Sequence[Capability]) -> PreTrainedModel:
    from tandem.engine.model.general import load_model

    return load_model(
        loading.source,
        loading.config,
        loading.dtype,
        loading.device,
        loading.progress,
        may_lack_head=any(each.may_lack_head for each in capabilities),
        cut=next((each.cut for each in capabilities if each.cut is not None), None),
        loader=next((each.loader for each in capabilities if each.loader is not None), None),
    )


def _fused(
    loading: ModelLoad, capabilities: Sequence[Capability], model: PreTrainedModel, probed: ProbeResult
) -> tuple[PreTrainedModel, _GeneralModel]:
    """Fuses the model, unless something speaks against it. Returns the model, which may have been loaded again, and what computes it."""
    from tandem.engine.model.fused.find import fuse
    from tandem.engine.model.probe import probe_attention

    device, shard = loading.device, loading.shard
    # A stage's part of a model gives no logits to compare. A GPU's pieces need a step's rows in one sequence, which mixers take apart.
    fusable = (
        not _is_alone(probed.parts)
        and (shard is None or shard.stages == 1)
        and not any(each.unchanged for each in capabilities)
        and (probed.parts.mixers is None or device.type == "cpu")
    )
    pieces = pieces_for(device, model.dtype, loading.threads) if fusable else None
    for each in capabilities:
        each.find(model, pieces)
    mixing_threads = 0
    if pieces is not None:
        fused = fuse(model, pieces, _updates(capabilities), shard.all_agree if shard is not None else None)
        if fused is None:
            log.warning(
                "%s is computed without fusion, which is slower: its fused parts do not give what it gives",
                loading.source.name,
            )
            model = _load_with(loading, capabilities)
            pieces, probed = None, probe_attention(model)
            for each in capabilities:
                each.find(model, pieces)
        elif pieces.copies and shard is None and _mostly_fused(model, fused.left, capabilities):
            # The kernels have their own threads on the same cores. Torch does little besides, except for mixers' long chunks.
            torch.set_num_threads(1)
            mixing_threads = loading.threads if probed.parts.mixers is not None else 0
    return model, _GeneralModel(loading, capabilities, model, probed, pieces, mixing_threads)


def _mostly_fused(model: PreTrainedModel, left: int, capabilities: Sequence[Capability]) -> bool:
    aside = sum(each.weights_aside(model) for each in capabilities)
    return (left - aside) * 10 < int(sum(weight.numel() for weight in model.parameters()))


def _is_alone(parts: ModelParts) -> bool:
    """Whether a layer attends by its own code or reads another layer's keys, so that fused pieces cannot be tried in the whole model."""
    return bool(parts.own) or any(layer.reads_of is not None for layer in parts.layers)


def _updates(capabilities: Sequence[Capability]) -> UpdatedLayers | None:
    return next((each.updates for each in capabilities if each.updates is not None), None)


class _GeneralModel:
    """A loaded model of the general path, as it is computed."""

    def __init__(
        self,
        loading: ModelLoad,
        capabilities: Sequence[Capability],
        model: PreTrainedModel,
        probed: ProbeResult,
        pieces: Pieces | None,
        mixing_threads: int,
    ) -> None:
        self._loading, self._capabilities = loading, capabilities
        self._model, self.parts, self._vocab_size = model, probed.parts, probed.vocab_size
        self._pieces, self._mixing_threads = pieces, mixing_threads

    def use_cache(self, kv_cache: torch.Tensor, plan: CachePlan, shape: ForwardShape) -> Forward:
        from tandem.engine.model.attention.cpu import CpuAttention
        from tandem.engine.model.attention.latents import gathering
        from tandem.engine.model.recorded_steps import RecordedSteps
        from tandem.engine.model.recurrent.layout import LayerStates
        from tandem.engine.model.transformers_forward import TransformersForward

        model, parts, adapted = self._model, self.parts, _updates(self._capabilities)
        wrappers = (each.around(model) for each in self._capabilities)
        around = next((found for found in wrappers if found is not None), None)
        if _is_alone(parts) or parts.mixers is not None:
            # Only gathering handles layers that attend by their own code or not at all. Such steps take their rows apart, so they
            # are not recorded.
            states = LayerStates(kv_cache, parts.mixers.layout) if parts.mixers is not None else None
            attention = gathering(kv_cache, plan, parts.expansions)
            return TransformersForward(model, attention, parts, states, adapted, self._mixing_threads, around)
        shard = self._loading.shard
        # The CPU kernels' attention knows no heads of other ranks in its cache, and their steps are recorded, which sums cannot be.
        pieces = self._pieces if shard is None else None
        chosen = _choose_attention(kv_cache, plan, parts, shape, pieces, model.dtype)
        forward = TransformersForward(model, chosen, parts, adapted=adapted, around=around)
        if isinstance(chosen, CpuAttention):
            return RecordedSteps(forward, chosen)
        # A pipeline stage receives and sends within a step, which a recording cannot.
        if (
            self._loading.device.type != "cuda"
            or any(each.unchanged for each in self._capabilities)
            or (shard is not None and shard.stages > 1)
        ):
            return forward
        return self._recorded(forward, plan, shape)

    def _recorded(self, forward: TransformersForward, plan: CachePlan, shape: ForwardShape) -> DecodeGraphs:
        from tandem.engine.model.decode_graphs import CudaRecorder, DecodeGraphs

        loading = self._loading
        graphs = DecodeGraphs(
            forward,
            CudaRecorder(loading.device),
            num_groups=len(plan.groups),
            block_size=plan.block_size,
            max_tokens=recorded_tokens(shape),
            device=loading.device,
            shard=loading.shard,
        )
        with torch.inference_mode():
            graphs.record_ahead(lambda share: loading.progress("recording decode steps", share))
        return graphs

    def beside_cache(self, shape: ForwardShape, tokens: int) -> int:
        from tandem.engine.model.attention import flashinfer
        from tandem.engine.model.decode_graphs import memory_of_graphs
        from tandem.engine.model.transformers_forward import peak_of_step

        model, vocab_size, recorded = self._model, self._vocab_size, recorded_tokens(shape)
        # The sampler holds float32 logits, the restricted logits, and its noise.
        sampling = 3 * 4 * shape.max_requests * vocab_size
        step = peak_of_step(model, tokens, shape.max_requests, self._loading.device)
        graphs = memory_of_graphs(recorded, vocab_size, model.dtype.itemsize)
        listed = flashinfer.bytes_of_pages(self.parts.layers, recorded, shape.max_model_len, shape.block_size)
        return step + sampling + graphs + listed + flashinfer.WORKSPACE_BYTES


def _embed_size(model: Any) -> int:
    """The size of an embedding; 0 if the model also needs the token ids themselves, so that rows cannot replace embeddings."""
    asks_tokens = bool(getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0))
    if asks_tokens or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return 0
    return int(getattr(model.get_input_embeddings(), "embedding_dim", 0))


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
