"""Tensor parallel: loads one rank's part of a model, and makes the cut layers give the whole layers' results.

Transformers cuts while it reads: it copies only the rank's rows or columns of each matrix. What it adds to the layers for that (DTensors,
and a wrapper around each layer's forward) is removed again, because a cut layer needs only one collective, which goes through the
node's own group.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.compressed import EXPANDS
from tandem.engine.model.shard import EmptyPart, MatrixPart, Shard, heads_of_rank
from tandem.engine.model.source import ModelSource
from tandem.engine.model.wide import plan
from tandem.kvtransfer.base import HeadShare

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
    rules = plan.overrides(source.name, config, shard.size)
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
    if style in plan.OUTPUTS | plan.GATHERED:
        outputs = range(*_share(len(outputs), shard))
    elif style in plan.INPUTS | plan.SPLIT:
        inputs = range(*_share(len(inputs), shard))
    elif style in plan.WHOLE and where.endswith(plan.KEYS_AND_VALUES):
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
    if style in plan.EXPERTS:
        experts = range(*_share(len(experts), shard))
    elif style in plan.PACKED | plan.INPUTS:
        inner = range(*_share(len(inner), shard))
    joins = where.endswith("down_proj")
    return MatrixPart(hidden if joins else inner, inner if joins else hidden, experts)


def join_parts(name: str, model: PreTrainedModel, shard: Shard) -> None:
    """Call it after loading. The model then computes what the whole model does, if all ranks run it together."""
    styles: dict[str, str] = model.tp_plan
    unknown = sorted(set(styles.values()) - plan.KNOWN)
    if unknown:
        raise ConfigurationError(
            f"{name} cannot be cut: its plan has styles that are unknown: {', '.join(unknown)}"
        )
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
    if style in plan.VOCABULARY:
        _join_vocabulary(module, shard)
    elif style in plan.GATHERED:
        module.register_forward_hook(_Gathering(shard, int(module.out_features)))  # type: ignore[arg-type]
    elif style in plan.INPUTS | plan.SPLIT:
        if style in plan.SPLIT:
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
        self._collectives = shard.collectives

    def __call__(self, _module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.contiguous()
        self._collectives.sum(output)
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
                if (
                    isinstance(module, nn.Linear)
                    and parameter is not None
                    and len(parameter) == module.out_features
                ):
                    rows = parameter[kept.start * dimension : kept.stop * dimension].clone()
                    module._parameters[part] = nn.Parameter(rows, requires_grad=False)
            attention.num_key_value_groups = text.num_attention_heads // shard.size


def heads_kept(
    name: str, model: PreTrainedModel, layers: Sequence[AttentionLayer], shard: Shard
) -> HeadShare | None:
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
        if where.endswith(EXPANDS) and model.tp_plan.get(_NUMBER.sub(".*", where)) in plan.OUTPUTS:
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
