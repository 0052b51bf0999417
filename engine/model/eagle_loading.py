"""From a folder with an EAGLE head, as vLLM and SGLang take it, to one that can guess, or a sentence that says why it cannot.

Its file has `fc`, which makes a row of an embedding and a hidden state, and one layer of Llama's without the norm before its attention. There is no
norm after it, and its tokens are chosen by the model's own head. The embeddings are the model's, too, unless the file has some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.cache.groups import KVCacheGroup
from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.attention.latents import gathering
from tandem.engine.model.attention.layers import CachePlan, plan_cache
from tandem.engine.model.content import weight_files
from tandem.engine.model.eagle import EagleHead
from tandem.engine.model.general import keep_rotary_constant
from tandem.engine.model.memory import allocate_cache
from tandem.engine.model.paths import ForwardShape
from tandem.engine.model.probe import probe_attention
from tandem.engine.model.source import ModelSource
from tandem.engine.model.transformers_forward import ModelParts, TransformersForward
from tandem.wire.errors import ConfigurationError

_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def tensors_of(source: ModelSource) -> Iterator[tuple[str, Any, str]]:
    """Its weights' names, each with the open file that it is in."""
    if source.gguf_file is not None:
        return
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                yield name.removeprefix("model."), tensors, name


def is_head(source: ModelSource) -> bool:
    return any(name == "fc.weight" for name, _, _ in tensors_of(source))


class _Rows(torch.nn.Module):
    def __init__(self, embeddings: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._embeddings, self._weight, self._bias = embeddings, weight, bias

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        pair = torch.cat([self._embeddings[token_ids], hidden.to(self._embeddings.dtype)], dim=-1)
        return torch.nn.functional.linear(pair, self._weight, self._bias)


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """Its weights, waiting for a KV cache."""

    source: ModelSource
    model: LlamaForCausalLM
    rows: _Rows
    parts: ModelParts
    plan: CachePlan

    @property
    def bytes_per_block(self) -> int:
        return self.plan.elements_per_block * int(self.model.dtype.itemsize)

    def beside_cache(self, shape: ForwardShape, tokens: int) -> int:
        """Its one layer takes less than a layer of the model has just before."""
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
            TransformersForward(self.model, gathering(kv_cache, self.plan, {}), self.parts),
            self.rows,
            num_blocks,
            device,
            table=next(index for index, group in enumerate(groups) if group.keeps_every_token),
            block_size=self.plan.block_size,
            max_model_len=min(shape.max_model_len, self.model.config.max_position_embeddings),
        )


def load_head(
    source: ModelSource,
    target: ModelSource,
    plan: CachePlan,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedHead:
    """`target` and what follows are the model's that it guesses for. Raises ConfigurationError."""

    def refusal(why: str) -> ConfigurationError:
        return ConfigurationError(f"model.draft names {source.name}, a head that {why}")

    described = source.read_json("config.json")
    names = " ".join(described.get("architectures") or ())
    own = {
        name: tensors.get_tensor(full).to(device, dtype)
        for name, tensors, full in tensors_of(source)
        if tensors.get_slice(full).get_dtype() in ("F32", "F16", "BF16")
    }
    if "eagle3" in names.lower() or "d2t" in own or any(name.startswith("midlayer.") for name in own):
        raise refusal("reads three of the model's layers (EAGLE-3), which is not served: name one of EAGLE-1")
    if any(name.startswith("layers.1.") for name in own):
        raise refusal("has several layers, and one is served")
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
    embeddings = own.get("embed_tokens.weight", theirs.get(_EMBEDDINGS))
    head = theirs.get(_HEAD, theirs.get(_EMBEDDINGS))
    if embeddings is None or head is None:
        raise refusal(f"needs the embeddings of {target.name}, which has none where a Llama has them")
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=PAGED)
    layer: Any = model.model.layers[0]
    layer.input_layernorm = torch.nn.Identity()
    model.model.norm = torch.nn.Identity()
    weights = {f"model.{name}": own[name] for name in own if name.startswith("layers.0.")}
    weights |= {_EMBEDDINGS: embeddings, _HEAD: head}
    weights.pop("model.layers.0.input_layernorm.weight", None)
    fc = own.get("fc.weight")
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    wrong = [name for name in wanted.keys() & weights.keys() if weights[name].shape != wanted[name]]
    missing = sorted((wanted.keys() - weights.keys()) | set(wrong))
    if missing or fc is None or fc.shape != (hidden_size, 2 * hidden_size):
        raise refusal(f"lacks {', '.join(missing) or 'fc.weight'} in the shape that its configuration says")
    model.load_state_dict(weights, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.eval().requires_grad_(False)
    keep_rotary_constant(model)
    parts = probe_attention(model).parts
    return LoadedHead(
        source,
        model,
        _Rows(embeddings, fc, own.get("fc.bias")),
        parts,
        plan_cache(parts.layers, plan.block_size),
    )
