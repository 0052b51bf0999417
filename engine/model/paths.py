"""Chooses how a model is computed: by the native library if it knows the model, otherwise by transformers (the general path)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.capabilities import Capability, ModelLoad, ToAttend, first_of
from tandem.engine.model.kernel_linear import widen_left
from tandem.engine.model.loaded import ForwardShape, LoadedModel
from tandem.engine.model.native.architecture import describe
from tandem.engine.model.native.forward import NativeLlamaForward, supports
from tandem.engine.model.native.shared import pack_once
from tandem.engine.model.runner import Forward
from tandem.engine.model.weight_formats import weight_format

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.pieces import Pieces
    from tandem.engine.model.probe import ProbeResult
    from tandem.engine.model.transformers_forward import ModelParts

log = logging.getLogger(__name__)


def load_native(loading: ModelLoad, capabilities: Sequence[Capability] = ()) -> LoadedModel | str:
    """Loads the model into the native library. Returns the reason if the library does not know the model or cannot be compiled."""
    source, config, dtype, threads = loading.source, loading.config, loading.dtype, loading.threads
    may_lack_head = any(each.may_lack_head for each in capabilities)
    found = weight_format(source, config)
    plain = found.plain(config) if found is not None else config
    reason = supports(plain, dtype, loading.device)
    if reason is not None:
        return reason

    def tell(share: float) -> None:
        loading.progress("loading weights", share)

    def pack() -> NativeLlamaForward:
        if found is None:
            return NativeLlamaForward.from_checkpoint(
                source.folder, config, dtype=dtype, threads=threads, progress=tell, may_lack_head=may_lack_head
            )
        if (stored := found.stored_tensors(config)) is not None:
            forward = NativeLlamaForward(
                config, stored.take, dtype=dtype, threads=threads, rotary=stored.rotary(), progress=tell
            )
            stored.refuse_rest()
            return forward
        from tandem.engine.model.general import load_model

        module = load_model(source, config, dtype, loading.device, loading.progress)
        return NativeLlamaForward.from_module(module, threads=threads, release=True, progress=tell)

    forward = pack_once(loading, plain, pack)
    log.info("%s: %d kB of packed matrices", source.name, forward.weight_bytes // 1000)
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
        weight_bytes=forward.file_bytes or forward.weight_bytes,
        shares_weights=forward.file_bytes > 0,
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
    if (loaded := first_of(each.load() for each in capabilities)) is not None:
        return loaded
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
    widen_left(model)
    for each in capabilities:
        each.change(model)
    parts, mixers = computed.parts, computed.parts.mixers
    loaded = LoadedModel(
        probed.parts.layers,
        probed.vocab_size,
        model.dtype,
        computed.use_cache,
        first_of(each.step_memory(model, parts, probed.vocab_size) for each in capabilities),
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
        cut=first_of(each.cut for each in capabilities),
        loader=first_of(each.loader for each in capabilities),
    )


def _fused(
    loading: ModelLoad, capabilities: Sequence[Capability], model: PreTrainedModel, probed: ProbeResult
) -> tuple[PreTrainedModel, _GeneralModel]:
    """Fuses the model, unless something speaks against it. Returns the model, which may have been loaded again, and what computes it."""
    from tandem.engine.model.probe import probe_attention

    # A stage's part of a model gives no logits to compare. A GPU's pieces need a step's rows in one sequence, which mixers take apart.
    shard = loading.shard
    fusable = (
        not _is_alone(probed.parts)
        and (shard is None or shard.stages == 1)
        and not any(each.unchanged for each in capabilities)
        and (probed.parts.mixers is None or loading.device.type == "cpu")
    )
    fuser = next((each for each in capabilities if each.fuses), None) if fusable else None
    pieces = pieces_for(capabilities, model.dtype) if fuser is not None else None
    for each in capabilities:
        each.find(model, pieces)
    mixing_threads = 0
    if fuser is not None and pieces is not None:
        left = fuser.fuse(model, pieces, first_of(each.updates for each in capabilities))
        if left is None:
            log.warning(
                "%s is computed without fusion, which is slower: its fused parts do not give what it gives",
                loading.source.name,
            )
            model = _load_with(loading, capabilities)
            pieces, probed = None, probe_attention(model)
            for each in capabilities:
                each.find(model, pieces)
        elif pieces.copies and shard is None and _mostly_fused(model, left, capabilities):
            # The kernels have their own threads on the same cores. Torch does little besides, except for mixers' long chunks.
            torch.set_num_threads(1)
            mixing_threads = loading.threads if probed.parts.mixers is not None else 0
    return model, _GeneralModel(capabilities, model, probed, pieces, mixing_threads)


def _mostly_fused(model: PreTrainedModel, left: int, capabilities: Sequence[Capability]) -> bool:
    aside = sum(each.weights_aside(model) for each in capabilities)
    return (left - aside) * 10 < int(sum(weight.numel() for weight in model.parameters()))


def _is_alone(parts: ModelParts) -> bool:
    """Whether a layer attends by its own code or reads another layer's keys, so that fused pieces cannot be tried in the whole model."""
    return parts.own is not None or any(layer.reads_of is not None for layer in parts.layers)


class _GeneralModel:
    """A loaded model of the general path, as it is computed."""

    def __init__(
        self,
        capabilities: Sequence[Capability],
        model: PreTrainedModel,
        probed: ProbeResult,
        pieces: Pieces | None,
        mixing_threads: int,
    ) -> None:
        self._capabilities = capabilities
        self._model, self.parts = model, probed.parts
        self._pieces, self._mixing_threads = pieces, mixing_threads

    def use_cache(self, kv_cache: torch.Tensor, plan: CachePlan, shape: ForwardShape) -> Forward:
        from tandem.engine.model.compressed import gathering
        from tandem.engine.model.transformers_forward import TransformersForward

        model, parts, capabilities = self._model, self.parts, self._capabilities
        adapted = first_of(each.updates for each in capabilities)
        around = first_of(each.around(model) for each in capabilities)
        of = ToAttend(kv_cache, plan, parts, shape, self._pieces, model.dtype)
        # Only gathering handles layers that attend by their own code or not at all. Such steps take their rows apart, so they are not
        # recorded.
        gathers = _is_alone(parts) or parts.mixers is not None
        attention = gathering(kv_cache, plan, parts.latents) if gathers else _choose_attention(of, capabilities)
        for each in capabilities:
            attention = each.exchanged(attention, of)
        if gathers:
            states = parts.mixers.bound_to(kv_cache) if parts.mixers is not None else None
            return TransformersForward(model, attention, parts, states, adapted, self._mixing_threads, around)
        forward = TransformersForward(model, attention, parts, adapted=adapted, around=around)
        if any(each.unchanged for each in capabilities):
            return forward
        return first_of(each.recorded(forward, plan, shape) for each in capabilities) or forward


def _embed_size(model: Any) -> int:
    """The size of an embedding; 0 if the model also needs the token ids themselves, so that rows cannot replace embeddings."""
    asks_tokens = bool(getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0))
    if asks_tokens or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return 0
    return int(getattr(model.get_input_embeddings(), "embedding_dim", 0))


def pieces_for(capabilities: Sequence[Capability], dtype: torch.dtype) -> Pieces | None:
    """The fused pieces for this device and dtype; None if the model is best left unchanged."""
    return first_of(each.pieces(dtype) for each in capabilities)


def _choose_attention(of: ToAttend, capabilities: Sequence[Capability]) -> PagedAttention:
    from tandem.engine.model.compressed import gathering

    found = first_of(each.attention(of) for each in capabilities)
    return found if found is not None else gathering(of.kv_cache, of.plan, of.parts.latents)
