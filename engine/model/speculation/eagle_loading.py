"""Loads an EAGLE head from a folder as vLLM and SGLang take it. Raises a ConfigurationError that says why it cannot make drafts.

EAGLE-1's file has `fc`, which makes a row from an embedding and a hidden state, and one Llama layer without the norm before its
attention. No norm follows it, and the model's own head chooses its tokens. EAGLE-3's `fc` makes one hidden state from those of three
layers, its layer attends to that state and the embedding side by side, and it has its own head for some of the tokens (`d2t`). The
embeddings are the model's, unless the file has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.attention.layers import CachePlan, plan_cache
from tandem.engine.model.compressed import gathering
from tandem.engine.model.general import keep_rotary_constant
from tandem.engine.model.loaded import ForwardShape
from tandem.engine.model.memory import allocate_cache
from tandem.engine.model.observed import ObservedLayers
from tandem.engine.model.probe import probe_attention
from tandem.engine.model.source import ModelSource
from tandem.engine.model.speculation.eagle import EagleHead, Join
from tandem.engine.model.tensor_files import open_tensors
from tandem.engine.model.transformers_forward import ModelParts, TransformersForward

_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def tensors_of(source: ModelSource) -> Iterator[tuple[str, Any, str]]:
    """The names of the head's weights, each with the open file that it is in."""
    if source.gguf_file is not None:
        return
    for name, file in open_tensors(source).items():
        yield name.removeprefix("model."), file, name


def is_head(source: ModelSource) -> bool:
    return any(name == "fc.weight" for name, _, _ in tensors_of(source))


def reads_three(source: ModelSource) -> bool:
    """Whether this is an EAGLE-3 head, which reads three layers."""
    return any(name == "d2t" or name.startswith("midlayer.") for name, _, _ in tensors_of(source))


def layers_read(source: ModelSource, target: Any) -> tuple[int, ...]:
    """The layers of the target whose inputs an EAGLE-3 head reads; empty for anything else."""
    if not is_head(source) or not reads_three(source):
        return ()
    described, count = source.read_json("config.json"), int(target.get_text_config().num_hidden_layers)
    said = described.get("eagle_aux_hidden_state_layer_ids") or (described.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    found = tuple(int(number) for number in said) if said else (2, count // 2, count - 3)
    if len(found) != 3 or not all(0 <= number <= count for number in found):
        raise ConfigurationError(
            f"model.draft names {source.name}, a head that reads the layers {list(found)} of a model that has {count}: "
            "name a head that was made for this model"
        )
    return found


class _Rows(torch.nn.Module):
    """Makes the input of the head's layer. In EAGLE-1 this is one row made from an embedding and a hidden state; in EAGLE-3 it is both
    side by side, and the hidden state is made from three."""

    def __init__(
        self, embeddings: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, third: bool
    ) -> None:
        super().__init__()
        self._embeddings, self._weight, self._bias, self._third = embeddings, weight, bias, third

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self._embeddings.dtype)
        if self._third and hidden.shape[-1] == self._weight.shape[1]:  # the model's three, not the head's own state
            hidden = torch.nn.functional.linear(hidden, self._weight, self._bias)
        pair = torch.cat([self._embeddings[token_ids], hidden], dim=-1)
        return pair if self._third else torch.nn.functional.linear(pair, self._weight, self._bias)


class _ThirdLayer(LlamaDecoderLayer):  # type: ignore[misc]  # transformers' classes have no types here
    """EAGLE-3's layer: it attends to the embedding and the hidden state side by side, and adds to the hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        size = config.hidden_size
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            made = getattr(self.self_attn, name)
            wider = torch.nn.Linear(2 * size, made.out_features, bias=made.bias is not None)
            setattr(self.self_attn, name, wider)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        embeddings, hidden = hidden_states.chunk(2, dim=-1)
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(hidden_states=both, **options)[0]
        found: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class NoEmbeddings(torch.nn.Module):
    """A head's embedding, which a step never uses because all rows are given. For probing it returns rows that differ by token."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._width, self._dtype, self._device = width, dtype, device

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(1, self._width + 1, device=self._device)
        return torch.sin(numbers * (token_ids[..., None] + 1)).to(self._dtype)


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A head whose weights are loaded and which has no KV cache yet."""

    source: ModelSource
    model: PreTrainedModel
    rows: Join
    parts: ModelParts
    plan: CachePlan
    words: torch.Tensor | None = None  # the model's token for each of the head's, if they differ
    observed: ObservedLayers | None = None  # the layers that it reads; None: the model's last hidden states

    @property
    def bytes_per_block(self) -> int:
        return self.plan.elements_per_block * int(self.model.dtype.itemsize)

    def beside_cache(self, shape: ForwardShape, tokens: int) -> int:
        """0: the head's one layer takes less memory than the model's step has just freed."""
        return 0

    def with_cache(
        self,
        num_blocks: int,
        groups: tuple[KVCacheGroup, ...],
        vocab_size: int,
        device: torch.device,
        shape: ForwardShape,
    ) -> EagleHead:
        kv_cache = allocate_cache(self.plan, num_blocks, self.model.dtype, device)
        return EagleHead(
            TransformersForward(self.model, gathering(kv_cache, self.plan, self.parts.latents), self.parts),
            self.rows,
            num_blocks,
            device,
            table=next(index for index, group in enumerate(groups) if group.keeps_every_token),
            block_size=self.plan.block_size,
            max_model_len=min(shape.max_model_len, self.model.config.max_position_embeddings),
            words=self.words,
            observed=self.observed,
        )


def load_head(
    source: ModelSource,
    target: ModelSource,
    plan: CachePlan,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    observed: ObservedLayers | None,
) -> LoadedHead:
    """`target` and the arguments after it belong to the model that drafts are made for. Raises a ConfigurationError."""

    def refusal(why: str) -> ConfigurationError:
        return ConfigurationError(f"model.draft names {source.name}, a head that {why}")

    described, third = source.read_json("config.json"), reads_three(source)
    own = {
        name.replace("midlayer.", "layers.0."): tensors.get_tensor(full).to(device)
        for name, tensors, full in tensors_of(source)
    }
    words = own.pop("d2t", None)
    own = {name: tensor.to(dtype) for name, tensor in own.items() if tensor.is_floating_point()}
    if any(name.startswith("layers.1.") for name in own):
        raise refusal("has several layers, and one is served")
    if described.get("norm_before_residual"):
        raise refusal("adds its layer to the norm of its hidden state (norm_before_residual), which is not served")
    config = LlamaConfig.from_dict({**described, "model_type": "llama", "num_hidden_layers": 1})
    if (config.hidden_size, config.vocab_size) != (hidden_size, vocab_size):
        raise refusal(
            f"was made for a model of {config.vocab_size} tokens and hidden states of {config.hidden_size} numbers, and "
            f"{target.name} has {vocab_size} and {hidden_size}"
        )
    theirs = {
        full: tensors.get_tensor(full).to(device, dtype)
        for _, tensors, full in tensors_of(target)
        if full in (_EMBEDDINGS, _HEAD)
    }
    embeddings = own.pop("embed_tokens.weight", theirs.get(_EMBEDDINGS))
    head = theirs.get(_HEAD, theirs.get(_EMBEDDINGS))
    if embeddings is None or head is None:
        raise refusal(f"needs the embeddings of {target.name}, which has none where a Llama has them")
    fc, bias = own.pop("fc.weight", None), own.pop("fc.bias", None)
    weights = {f"model.{name}": own[name] for name in own if name.startswith("layers.0.")}
    model: Any = _empty_model(config, dtype, own.get("lm_head.weight", head).shape[0] if third else 0)
    model.model.norm = torch.nn.Identity()
    if third:
        model.model.embed_tokens = NoEmbeddings(2 * hidden_size, dtype, device)
        weights["lm_head.1.weight"] = own.get("lm_head.weight", head)
        if "norm.weight" in own:
            weights["lm_head.0.weight"] = own["norm.weight"]
    else:
        model.model.layers[0].input_layernorm = torch.nn.Identity()
        weights.pop("model.layers.0.input_layernorm.weight", None)
        weights |= {_EMBEDDINGS: embeddings, _HEAD: head}
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    wrong = {name for name in wanted.keys() & weights.keys() if weights[name].shape != wanted[name]}
    missing = sorted((wanted.keys() - weights.keys()) | wrong)
    if missing or fc is None or fc.shape != (hidden_size, (3 if third else 2) * hidden_size):
        raise refusal(f"lacks {', '.join(missing) or 'fc.weight'} in the shape that its configuration says")
    if third:
        words = _words(words, weights["lm_head.1.weight"].shape[0], vocab_size)
        if words is None:
            raise refusal("says by no d2t which of the model's tokens its own are")
    model.load_state_dict(weights, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.eval().requires_grad_(False)
    keep_rotary_constant(model)
    parts = probe_attention(model).parts
    return LoadedHead(
        source,
        model,
        _Rows(embeddings, fc, bias, third=third),
        parts,
        plan_cache(parts.layers, plan.block_size),
        words,
        observed if third else None,
    )


def _empty_model(config: LlamaConfig, dtype: torch.dtype, third_rows: int) -> LlamaForCausalLM:
    """The head's layers without weights. `third_rows` are the tokens that an EAGLE-3 head chooses from; 0: it is an EAGLE-1 head."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=PAGED)
        if third_rows:
            model.model.layers[0] = _ThirdLayer(model.config).to(dtype)
            norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            choice = torch.nn.Linear(config.hidden_size, third_rows, bias=False)
            model.lm_head = torch.nn.Sequential(norm, choice).to(dtype)
    return model


def _words(differences: torch.Tensor | None, count: int, vocab_size: int) -> torch.Tensor | None:
    """The model's token for each of the head's tokens; None if the head has the model's vocabulary."""
    if differences is None:
        differences = torch.zeros(count, dtype=torch.int64) if count == vocab_size else None
    if differences is None or differences.shape != (count,):
        return None
    words = differences.to(torch.int64) + torch.arange(count, device=differences.device)
    return words if int(words.min()) >= 0 and int(words.max()) < vocab_size else None
