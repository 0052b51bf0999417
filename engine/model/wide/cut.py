"""Tensor parallel: loads one rank's part of a model, and makes the cut layers give the whole layers' results.

Transformers cuts while it reads: it copies only the rank's rows or columns of each matrix. What it adds to the layers for that (DTensors,
and a wrapper around each layer's forward) is removed again, because a cut layer needs only one collective, which goes through the
node's own group.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.compressed import EXPANDS
from tandem.engine.model.shard import EmptyPart, MatrixPart, Shard, fits, heads_of_rank
from tandem.engine.model.source import ModelSource
from tandem.kvtransfer.base import HeadShare

# Every rank has the whole layer.
WHOLE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"}
OUTPUTS = {"colwise"}  # each rank computes some of the outputs, and the next layer needs no others
GATHERED = {"colwise_gather_output", "colwise_rep"}  # the same, and every rank gets all outputs
INPUTS = {"rowwise", "moe_tp_experts"}  # each rank has some of the inputs, and the results are summed
SPLIT = {"rowwise_split_input", "rowwise_rep"}  # the same, but each rank gets all inputs
VOCABULARY = {"embedding_rowwise"}  # each rank has the embeddings of some tokens
PACKED = {"packed_colwise", "packed_rowwise"}  # for parameters only: two matrices in one, each is cut
EXPERTS = {"grouped_gemm"}  # for parameters only: each rank has some whole experts
KNOWN = WHOLE | OUTPUTS | GATHERED | INPUTS | SPLIT | VOCABULARY | PACKED | EXPERTS

KEYS_AND_VALUES = ("k_proj", "v_proj")
# Types of models with latents whose plan in transformers leaves attention whole. The paths of the layers that have a part for each head.
_WHOLE_LATENTS = ("deepseek_v3", "axk1", "youtu")
_ATTENTION = "layers.*.self_attn."
_SETTING = "pools.<pool>.tensor_parallel"


def overrides(name: str, config: Any, size: int) -> dict[str, str]:
    """Changes to the model's own plan. Raises a ConfigurationError for a model that cannot be cut into `size` parts."""
    text = config.get_text_config()
    own: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    heads_of_latents = _of_latents(text, own)
    plan = own | heads_of_latents
    if not (INPUTS | SPLIT) & set(plan.values()):
        raise ConfigurationError(
            f"{name} cannot be served on {size} ranks: transformers has no plan that cuts a model of type {text.model_type}. "
            f"Set {_SETTING} to 1"
        )
    unknown = sorted(set(plan.values()) - KNOWN)
    if unknown:
        raise ConfigurationError(
            f"{name} cannot be served on {size} ranks: transformers' plan for a model of type {text.model_type} cuts layers in a "
            f"way that Tandem does not know ({', '.join(unknown)}). Set {_SETTING} to 1"
        )
    prefix = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].base_model_prefix
    changed = heads_of_latents | _of_experts(text, plan, size)
    rules = {f"{prefix}.{key}": style for key, style in changed.items()}
    latents = any(key.endswith(EXPANDS) and style in OUTPUTS for key, style in plan.items())
    cut = [key for key, style in plan.items() if key.endswith(KEYS_AND_VALUES) and style in OUTPUTS]
    if not cut and not latents:
        return rules
    heads = int(text.num_attention_heads)
    kv_heads = heads if latents else int(getattr(text, "num_key_value_heads", None) or heads)
    if not fits(heads, kv_heads, size):
        fitting = [str(width) for width in range(1, heads + 1) if fits(heads, kv_heads, width)]
        raise ConfigurationError(
            f"{name} cannot be served on {size} ranks: its {heads} heads of queries and {kv_heads} of keys and values cannot be "
            f"shared equally. Set {_SETTING} to one of {', '.join(fitting)}"
        )
    if kv_heads < size:
        rules |= {f"{prefix}.{key}": "replicate" for key in cut}
    return rules


def _of_latents(text: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Each rank gets some heads of a model with latents that transformers' plan does not cut."""
    if text.model_type not in _WHOLE_LATENTS or any(key.startswith(_ATTENTION) for key in plan):
        return {}
    queries = "q_proj" if getattr(text, "q_lora_rank", None) is None else "q_b_proj"
    cut = {queries: "colwise", EXPANDS: "colwise", "o_proj": "rowwise"}
    return {f"{_ATTENTION}{name}": style for name, style in cut.items()}


def _of_experts(text: Any, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Each rank gets some whole experts if the model has a plan for that and they can be shared equally; otherwise a part of each."""
    experts = dict(getattr(text, "base_model_ep_plan", None) or {})
    kept = {key: style for key, style in experts.items() if style in EXPERTS}
    others = set(experts.values()) - EXPERTS
    modules = [key for key in experts if key not in kept]
    count = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    is_known = others == {"ep_dispatch_experts"} and all(plan.get(key) == "moe_tp_experts" for key in modules)
    return kept if is_known and isinstance(count, int) and count % size == 0 else {}


_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_loading = threading.Lock()  # transformers uses the process's one default group


@contextmanager
def loading_stage() -> Iterator[dict[str, Any]]:
    """Like `loading_part`, for a rank with whole layers."""
    with _loading:
        yield {}


@contextmanager
def loading_part(source: ModelSource, shard: Shard, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields options for `from_pretrained`. Ranks do not communicate while they load, so transformers gets a fake group that only has
    the right size."""
    # Our plain configuration, which is quicker to read, has no plan.
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    rules = overrides(source.name, config, shard.size)
    with _loading:
        if dist.is_initialized():
            raise InternalError("a model's part is loaded in a process that has a group of its own")
        before = os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        dist.init_process_group("fake", rank=shard.rank, world_size=shard.size, store=FakeStore())
        try:
            yield {"distributed_config": DistributedConfig(tp_size=shard.size, tp_plan=rules or None)}
        finally:
            dist.destroy_process_group()
            os.environ.pop("LOCAL_RANK")
            if before is not None:
                os.environ["LOCAL_RANK"] = before


def part_of(model: PreTrainedModel, where: str, shard: Shard) -> MatrixPart:
    """This rank's part of a linear layer, or of a tensor of experts, that is not read by transformers. The module has the whole layer's
    sizes."""
    modules = dict(model.named_modules())
    if where not in modules:
        return _part_of_experts(model, where, modules[where.rpartition(".")[0]], shard)
    module = modules[where]
    outputs, inputs = range(int(module.out_features)), range(int(module.in_features))
    style = model.tp_plan.get(_NUMBER.sub(".*", where)) if shard.size > 1 else None
    if style in OUTPUTS | GATHERED:
        outputs = range(*_share(len(outputs), shard))
    elif style in INPUTS | SPLIT:
        inputs = range(*_share(len(inputs), shard))
    elif style in WHOLE and where.endswith(KEYS_AND_VALUES):
        dimension = getattr(modules[where.rpartition(".")[0]], "head_dim", None)
        if isinstance(dimension, int):
            kept = heads_of_rank(len(outputs) // dimension, shard.rank, shard.size)
            outputs = range(kept.start * dimension, kept.stop * dimension)
    return MatrixPart(outputs, inputs)


def _part_of_experts(model: PreTrainedModel, where: str, module: Any, shard: Shard) -> MatrixPart:
    """Whole experts, or a part of each, as the plan says."""
    style = model.tp_plan.get(_NUMBER.sub(".*", where)) if shard.size > 1 else None
    experts, inner, hidden = (
        range(int(total)) for total in (module.num_experts, module.intermediate_dim, module.hidden_dim)
    )
    if style in EXPERTS:
        experts = range(*_share(len(experts), shard))
    elif style in PACKED | INPUTS:
        inner = range(*_share(len(inner), shard))
    joins = where.endswith("down_proj")
    return MatrixPart(hidden if joins else inner, inner if joins else hidden, experts)


def join_parts(name: str, model: PreTrainedModel, shard: Shard) -> None:
    """Call it after loading. The model then computes what the whole model does, if all ranks run it together."""
    styles: dict[str, str] = model.tp_plan
    unknown = sorted(set(styles.values()) - KNOWN)
    if unknown:
        raise ConfigurationError(f"{name} cannot be cut: its plan has styles that are unknown: {', '.join(unknown)}")
    _take_out_parts(model)
    for where, module in model.named_modules():
        style = styles.get(_NUMBER.sub(".*", where))
        if style is None:
            continue
        module.__dict__.pop("forward", None)
        if not isinstance(module, EmptyPart):
            _join(module, style, shard)
    _keep_heads(name, model, styles, shard)


def _take_out_parts(model: PreTrainedModel) -> None:
    own: dict[int, nn.Parameter] = {}  # by the DTensor's id, because some parameters are used in two places
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in own:
                    own[id(parameter)] = nn.Parameter(parameter.to_local().contiguous(), requires_grad=False)
                module._parameters[name] = own[id(parameter)]


def _join(module: nn.Module, style: str, shard: Shard) -> None:
    if style in VOCABULARY:
        _join_vocabulary(module, shard)
    elif style in GATHERED:
        module.register_forward_hook(_Gathering(shard, int(module.out_features)))  # type: ignore[arg-type]
    elif style in INPUTS | SPLIT:
        if style in SPLIT:
            first, end = _share(int(module.in_features), shard)  # type: ignore[arg-type]
            module.register_forward_pre_hook(lambda _module, given: (given[0][..., first:end], *given[1:]))
        if shard.rank and getattr(module, "bias", None) is not None:
            module.bias = None  # type: ignore[assignment]  # only rank 0 adds the bias, so that the sum has it once
        if getattr(module, "_is_expert_parallel", False):
            module.register_forward_pre_hook(_Routing(shard, int(module.num_experts)))  # type: ignore[arg-type]
        module.register_forward_hook(AddingUp(shard))


def _share(total: int, shard: Shard) -> tuple[int, int]:
    """This rank's range. It cuts as torch does: equal shares, the last ones shorter."""
    size = -(-total // shard.size)
    return min(shard.rank * size, total), min((shard.rank + 1) * size, total)


class AddingUp:
    """A forward hook: sums the module's result over all ranks."""

    def __init__(self, shard: Shard) -> None:
        self._collectives, self._link = shard.collectives, shard.link

    def __call__(self, _module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.contiguous()
        self._collectives.sum(output)
        self._link.sums += 1
        return output


class _Routing:
    """Keeps only the router's choices of this rank's experts. A choice of another rank's expert gets weight 0 and a number that no expert
    has, so that it is skipped."""

    def __init__(self, shard: Shard, kept: int) -> None:
        self._first, self._kept = shard.rank * kept, kept

    def __call__(self, _module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states, chosen, weights = given
        own = chosen - self._first
        elsewhere = (own < 0) | (own >= self._kept)
        return states, own.masked_fill(elsewhere, self._kept), weights.masked_fill(elsewhere, 0.0)


class _Gathering:
    def __init__(self, shard: Shard, total: int) -> None:
        self._collectives = shard.collectives
        self._total, self._share = total, -(-total // shard.size)

    def __call__(self, _module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
        missing = self._share - output.shape[-1]
        if missing:  # the collective needs tensors of one shape from all ranks
            output = nn.functional.pad(output, (0, missing))
        parts = self._collectives.gather(output.contiguous())
        return torch.cat(parts.unbind(0), dim=-1)[..., : self._total]


def _join_vocabulary(module: nn.Module, shard: Shard) -> None:
    first, end = _share(int(module.num_embeddings), shard)  # type: ignore[arg-type]
    module.padding_idx = None  # type: ignore[assignment]  # it may be another rank's; only training asks for it
    look_up = module.forward

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        others = (token_ids < first) | (token_ids >= end)
        found: torch.Tensor = look_up((token_ids - first).masked_fill(others, 0))
        found = found.masked_fill(others[..., None], 0)
        shard.collectives.sum(found)
        return found

    module.forward = forward


def _keep_heads(name: str, model: PreTrainedModel, styles: dict[str, str], shard: Shard) -> None:
    """Keeps the KV heads that this rank's queries read, if keys and values were loaded whole. If they were cut, the rank's rows must be
    whole heads, or a ConfigurationError is raised."""
    text = model.config.get_text_config()
    modules = dict(model.named_modules())
    for where, module in modules.items():
        style = styles.get(_NUMBER.sub(".*", where))
        attention = modules[where.rpartition(".")[0]]
        dimension = getattr(attention, "head_dim", None)
        if not where.endswith(("q_proj", "k_proj", "v_proj")) or not isinstance(dimension, int):
            continue
        heads = int(module.out_features) // dimension
        if style == "colwise" and heads % shard.size:
            raise ConfigurationError(
                f"{name} cannot be served on {shard.size} ranks: {where} has {heads} heads, which cannot be shared equally. Set "
                "pools.<pool>.tensor_parallel to 1"
            )
        if style == "replicate" and not where.endswith("q_proj"):
            kept = heads_of_rank(heads, shard.rank, shard.size)
            for part, parameter in list(module._parameters.items()):
                # A quantized matrix was read in part.
                if isinstance(module, nn.Linear) and parameter is not None and len(parameter) == module.out_features:
                    rows = parameter[kept.start * dimension : kept.stop * dimension].clone()
                    module._parameters[part] = nn.Parameter(rows, requires_grad=False)
            attention.num_key_value_groups = text.num_attention_heads // shard.size


def heads_kept(name: str, model: PreTrainedModel, layers: Sequence[AttentionLayer], shard: Shard) -> HeadShare | None:
    """The heads that this rank's own cache has of each layer; None if layers differ in that."""
    try:
        placed = place_heads(name, model, layers, shard)
    except ConfigurationError:
        return None
    kept = {(layer.first_head, layer.num_kv_heads, layer.heads_in_cache) for layer in placed}
    return HeadShare(*kept.pop()) if len(kept) == 1 else None


def _heads_of_layers(model: PreTrainedModel) -> dict[int, int]:
    """The heads of keys that all ranks together have in each layer where they are cut."""
    totals: dict[int, int] = {}
    modules = dict(model.named_modules())
    for where, module in modules.items():
        attention = modules[where.rpartition(".")[0]]
        index, dimension = getattr(attention, "layer_idx", None), getattr(attention, "head_dim", None)
        if not isinstance(index, int):
            continue
        if where.endswith("k_proj") and isinstance(dimension, int):
            totals[index] = int(module.out_features) // dimension
        if where.endswith(EXPANDS) and model.tp_plan.get(_NUMBER.sub(".*", where)) in OUTPUTS:
            totals[index] = int(model.config.get_text_config().num_attention_heads)
    return totals


def place_heads(
    name: str, model: PreTrainedModel, layers: Sequence[AttentionLayer], shard: Shard
) -> tuple[AttentionLayer, ...]:
    """Sets the places of this rank's heads in a cache that all ranks share. A layer whose keys are not cut has all heads on every rank, and
    each rank writes the same there."""
    totals = _heads_of_layers(model)
    placed: dict[int, AttentionLayer] = {}
    for layer in layers:
        if layer.reads_of is not None:
            continue
        total = layer.num_kv_heads if layer.latent else totals.get(layer.index, layer.num_kv_heads)
        kept = range(total) if layer.num_kv_heads == total else heads_of_rank(total, shard.rank, shard.size)
        if len(kept) != layer.num_kv_heads:
            raise ConfigurationError(
                f"{name} cannot be served on {shard.size} ranks: layer {layer.index} keeps {layer.num_kv_heads} of {total} heads "
                "on one of them. Set pools.<pool>.tensor_parallel to 1"
            )
        placed[layer.index] = msgspec.structs.replace(layer, heads_in_cache=total, first_head=kept.start)
    for layer in layers:
        if layer.reads_of is not None:
            read = placed[layer.reads_of]
            placed[layer.index] = msgspec.structs.replace(
                layer, heads_in_cache=read.heads_in_cache, first_head=read.first_head
            )
    return tuple(placed[layer.index] for layer in layers)
