"""Pipeline parallel: each stage has some consecutive layers, and passes its hidden states to the next stage.

The first stage has the embedding; the last one has the final norm and the head, and its first rank sends the logits to rank 0. Layers of
other stages are replaced by empty ones before any weights are read, so the model's own code runs unchanged. The empty layer before a
stage's first one receives hidden states, and a stage's last layer sends them. Nothing else is passed; `check_stage` tries before the
model serves whether its layers need more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.shard import EmptyPart, Shard, exchange_logits
from tandem.engine.model.source import ModelSource
from tandem.kvtransfer.base import HeadShare

_SETTING = "pools.<pool>.pipeline_parallel"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layers_of_stage(total: int, stage: int, stages: int) -> range:
    """A stage's layers: equal shares in order. If they cannot be equal, the middle stages have one more, because the ends have the
    embedding and the head."""
    each, more = divmod(total, stages)
    order = sorted(range(stages), key=lambda number: (number in (0, stages - 1), number))
    sizes = [each + (order.index(number) < more) for number in range(stages)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def class_of_stage(source: ModelSource, shard: Shard) -> tuple[type[PreTrainedModel], Any]:
    """Returns a class that makes this stage's part of the model, and the configuration for it. Raises a ConfigurationError for a model that
    cannot be cut into stages."""
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    text = config.get_text_config()
    _refuse(source.name, text, shard.stages)
    whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    class OneStage(whole):  # type: ignore[misc,valid-type]  # one of transformers' classes
        def __init__(self, config: Any, *given: Any, **options: Any) -> None:
            super().__init__(config, *given, **options)
            _take_out_layers(self, shard)
            if not text.tie_word_embeddings:
                _take_out_ends(self, shard)

    # Transformers looks some things up by these names.
    OneStage.__name__, OneStage.__module__ = whole.__name__, whole.__module__
    return OneStage, config


def _refuse(name: str, text: Any, stages: int) -> None:
    plan = getattr(text, "base_model_pp_plan", None) or {}
    if plan.get("layers", ((), ()))[1] != ["hidden_states"]:
        raise ConfigurationError(
            f"{name} cannot be served in {stages} stages: transformers does not say what the layers of a model of type {text.model_type} "
            f"pass on (`base_model_pp_plan`). Set {_SETTING} to 1"
        )
    if text.num_hidden_layers < stages:
        raise ConfigurationError(
            f"{name} cannot be served in {stages} stages: it has {text.num_hidden_layers} layers. Set {_SETTING} to "
            f"{text.num_hidden_layers} at most"
        )


def finish_stage(model: PreTrainedModel, shard: Shard) -> None:
    """Call it after loading. If embedding and head are one matrix, it removes the one that another stage has, which was not possible
    earlier."""
    if model.config.get_text_config().tie_word_embeddings:
        _take_out_ends(model, shard)


def is_elsewhere(key: str, model: PreTrainedModel, shard: Shard) -> bool:
    """Whether a checkpoint's key belongs to another stage's part of the model."""
    found = _LAYER.search(key)
    if found is not None:
        total = model.config.get_text_config().num_hidden_layers
        return int(found[1]) not in layers_of_stage(total, shard.stage, shard.stages)
    empty = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, EmptyPart)}
    return not empty.isdisjoint(key.split("."))


def check_stage(model: PreTrainedModel, forward: Callable[[], None], shard: Shard) -> None:
    """Checks that the model's layers run one after another and pass on only hidden states. `forward` runs the model on this rank alone.

    All ranks call it, and all raise a ConfigurationError if one of them finds otherwise.
    """
    problem = _problem_of(model, forward, shard)
    for rank, told in enumerate(shard.tell_all(problem.encode())):
        if told:
            raise ConfigurationError(
                f"a model of type {model.config.get_text_config().model_type} cannot be served in {shard.stages} stages: "
                f"{told.decode()} (rank {rank}). Set {_SETTING} to 1"
            )


def _problem_of(model: PreTrainedModel, forward: Callable[[], None], shard: Shard) -> str:
    """Runs the model with NaN from all other stages' parts, except for the hidden states that this stage receives. If the stage's result
    has NaN, it reads something else of another stage. Returns the problem, or ""."""
    layers = _layers_of(model)
    own = layers_of_stage(len(layers), shard.stage, shard.stages)
    order: list[int] = []
    spoiled: list[int] = []

    def spoil(_module: nn.Module, _given: Any, output: Any) -> Any:
        return torch.full_like(output, float("nan"))

    def note(number: int) -> Callable[[nn.Module, Any, Any], Any]:
        def passed(_module: nn.Module, _given: Any, output: Any) -> Any:
            order.append(number)
            if number == own.start - 1:
                places = torch.arange(output.numel(), device=output.device)
                return torch.sin(places * 1.3).reshape(output.shape).to(output.dtype)
            if number in own and not output.isfinite().all():
                spoiled.append(number)
            return output

        return passed

    hooks = [layer.register_forward_hook(note(number)) for number, layer in enumerate(layers)]
    embedding: Any = model.get_input_embeddings()
    if isinstance(embedding, EmptyPart):
        hooks.append(embedding.register_forward_hook(spoil))
    try:
        forward()
    except Exception as error:  # the model's own code may need something that another stage has
        lines = str(error).strip().splitlines()
        return f"its part of stage {shard.stage} does not run by itself ({lines[0] if lines else type(error).__name__})"
    finally:
        for hook in hooks:
            hook.remove()
    if order != list(range(len(layers))):
        return "its layers do not run one after another, each of them once"
    if spoiled:
        return f"layer {spoiled[0]} reads more of the layers before it, or of the embedding, than the hidden states that it is given"
    return ""


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    total = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return module
    raise ConfigurationError(
        f"a model of type {model.config.get_text_config().model_type} cannot be served in stages: its {total} layers do not stand in "
        f"one list. Set {_SETTING} to 1"
    )


def _take_out_layers(model: PreTrainedModel, shard: Shard) -> None:
    layers = _layers_of(model)
    own = layers_of_stage(len(layers), shard.stage, shard.stages)
    for number in range(len(layers)):
        if number not in own:
            layers[number] = _EmptyLayer(layers[number], shard, receives=number == own.start - 1)
    layers[own.stop - 1].register_forward_hook(_Sends(shard))


class _Sends:
    """Sends the hidden states right after a stage's last layer, before the model's code changes them, because the next stage's code changes
    them in the same way."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __call__(self, module: nn.Module, _given: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            raise ConfigurationError(
                f"{type(module).__name__} passes on more than one tensor, so its model cannot be cut into stages. Set {_SETTING} to 1"
            )
        shard = self._shard
        if shard.link.is_on and not shard.is_last_stage:
            shard.collectives.send(output.contiguous(), shard.rank + shard.width)


def _take_out_ends(model: PreTrainedModel, shard: Shard) -> None:
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    keeps_head = shard.is_last_stage
    if shard.stage > 0:
        weight = embedding.weight
        model.set_input_embeddings(_EmptyEmbedding(int(weight.shape[1]), weight.dtype, shard))
    if not keeps_head:
        (name,) = [name for name, module in model.named_children() if module is head]
        setattr(model, name, _EmptyHead(int(head.out_features)))


class _EmptyLayer(EmptyPart):
    """Replaces another stage's layer. It keeps the layer's type, which models read from it."""

    def __init__(self, other: nn.Module, shard: Shard, *, receives: bool) -> None:
        super().__init__()
        for name, value in vars(other).items():
            if isinstance(value, str | int | float) and name not in self.__dict__:
                setattr(self, name, value)
        self._shard = shard
        self._receives = receives

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        shard = self._shard
        if shard.link.is_on and self._receives:
            hidden_states = torch.empty_like(hidden_states)
            shard.collectives.receive(hidden_states, shard.rank - shard.width)
        return hidden_states


class _EmptyEmbedding(EmptyPart):
    """Replaces the embedding. In a step its result is not read. Probing reads it, and needs different rows for different tokens."""

    def __init__(self, size: int, dtype: torch.dtype, shard: Shard) -> None:
        super().__init__()
        self.embedding_dim = size
        self._dtype = dtype
        self._shard = shard

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._shard.link.is_on:
            return torch.zeros(*token_ids.shape, self.embedding_dim, dtype=self._dtype, device=token_ids.device)
        places = torch.arange(self.embedding_dim, device=token_ids.device)
        return torch.sin(token_ids[..., None] * 0.7 + places * 1.3).to(self._dtype)


class _EmptyHead(EmptyPart):
    """Replaces the head. Its result is as wide as the head's, and differs between rows as its input does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_features = width

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        missing = self.out_features - hidden_states.shape[-1]
        return nn.functional.pad(hidden_states, (0, missing))  # a negative one cuts


def layers_of_all(own: Sequence[AttentionLayer], shard: Shard) -> tuple[AttentionLayer, ...]:
    """All layers, each as its own stage found it, because all ranks plan one cache. A collective."""
    found: dict[int, AttentionLayer] = {layer.index: layer for layer in own}
    for encoded in shard.tell_all(msgspec.msgpack.encode(list(own))):
        for layer in msgspec.msgpack.decode(encoded, type=list[AttentionLayer]):
            found.setdefault(layer.index, layer)
    layers = tuple(found[index] for index in sorted(found))
    for layer in layers:
        if layer.reads_of is not None and {layer.index, layer.reads_of} & {one.index for one in own}:
            raise ConfigurationError(
                f"layer {layer.index} reads the keys of layer {layer.reads_of}, so the model cannot be cut into stages. Set {_SETTING} to 1"
            )
    return layers


def heads_of_all(own: HeadShare | None, shard: Shard) -> HeadShare | None:
    """This rank's heads, if the ranks of every stage share the heads in the same way; otherwise None. A collective."""
    told = shard.tell_all(msgspec.msgpack.encode(own))
    heads = [msgspec.msgpack.decode(encoded, type=HeadShare | None) for encoded in told]
    alike = all(heads[rank] == heads[rank % shard.width] for rank in range(shard.size))
    return own if alike else None


def meet(shard: Shard, device: torch.device) -> None:
    """Sends once between each pair of ranks that communicates in a step. NCCL connects two ranks at their first message, through a file
    that is gone when the node serves."""
    token = torch.zeros(1, device=device)
    if shard.stage > 0:
        shard.collectives.receive(token, shard.rank - shard.width)
    if not shard.is_last_stage:
        shard.collectives.send(token, shard.rank + shard.width)
    exchange_logits(token, shard)
