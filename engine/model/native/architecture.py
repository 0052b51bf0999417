"""Which models the library computes (Llama, Mistral, Qwen2 and Qwen3), and how they differ."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tandem.engine.model.native.model_types import NATIVE_TYPES

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 256
# Types of rotary embedding whose frequencies are constants of the model.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Architecture(msgspec.Struct, frozen=True):
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool  # the head is the embedding

    @property
    def num_weights(self) -> int:
        """How many numbers the matrices have, without biases."""
        of_layer = self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.intermediate)
        return self.layers * of_layer + (1 if self.tied else 2) * self.vocab * self.hidden


def refusal(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model with this configuration cannot run here; None if it can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}"
    if config.model_type not in NATIVE_TYPES:
        return f"the model is of type {config.model_type}"
    if getattr(config, "quantization_config", None):
        return "the weights are quantized"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}"
    head_dim = head_size(config)
    if head_dim > _MAX_HEAD_DIM or head_dim % 2:
        return f"the head size is {head_dim}"
    if config.num_attention_heads % config.num_key_value_heads:
        return "the heads cannot be divided among the KV heads"
    if config.model_type == "llama" and getattr(config, "sliding_window", None):
        return "its configuration has a sliding window, which the code of this type does not have"
    return _rope_refusal(rope_parameters(config))


def _rope_refusal(rope: dict[str, Any]) -> str | None:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        return f"the rotary embedding is of type {kind}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "the rotary embedding covers a part of each head"
    if "rope_theta" not in rope:
        return "the rotary embedding differs between layers"
    return None


def describe(config: Any) -> Architecture:
    kind = config.model_type
    # Mistral has no biases, whatever its configuration says. Qwen2 always has those of queries, keys and values, and no others.
    biased = kind in ("llama", "qwen3") and bool(config.attention_bias)
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        qk_norm=kind == "qwen3",
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased,
        mlp_bias=kind == "llama" and bool(config.mlp_bias),
        tied=bool(config.tie_word_embeddings),
    )


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_parameters(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})
