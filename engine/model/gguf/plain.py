"""Reads the configuration of plain Llamas and Qwens from a file's metadata without transformers, whose import takes seconds in each node."""

from __future__ import annotations

from typing import Any

from tandem.engine.model.gguf.metadata import Metadata
from tandem.engine.model.plain_config import PlainConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SIZES = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
}
_QWEN3_HEAD = 128  # transformers reads no other size of its heads from a file


def plain_config(metadata: Metadata) -> PlainConfig | None:
    """What transformers reads; None for a file with anything more."""
    kind, said = metadata.general("general.architecture"), metadata.below("")
    if kind not in _ARCHITECTURES or said.keys() - _SIZES or any(map(_differs_by_layer, said.values())):
        return None
    try:
        hidden, heads = said["embedding_length"], said["attention.head_count"]
        head_dim = said.get("attention.key_length", said.get("rope.dimension_count", hidden // heads))
        alike = {head_dim, *(said.get(key, head_dim) for key in ("attention.value_length", "rope.dimension_count"))}
        if len(alike) > 1 or head_dim != (_QWEN3_HEAD if kind == "qwen3" else hidden // heads):
            return None
        return PlainConfig(
            model_type=kind,
            vocab_size=said.get("vocab_size") or metadata.general("tokenizer.ggml.tokens").length,
            hidden_size=hidden,
            intermediate_size=said["feed_forward_length"],
            num_hidden_layers=said["block_count"],
            num_attention_heads=heads,
            num_key_value_heads=said["attention.head_count_kv"],
            head_dim=head_dim,
            max_position_embeddings=said["context_length"],
            rms_norm_eps=float(said["attention.layer_norm_rms_epsilon"]),
            hidden_act="silu",
            tie_word_embeddings="output.weight" not in metadata.tensors,
            attention_bias=False,
            mlp_bias=False,
            eos_token_id=metadata.general("tokenizer.ggml.eos_token_id"),
            rope_parameters={"rope_theta": float(said["rope.freq_base"]), "rope_type": "default"},
            sliding_window=None,
            layer_types=["full_attention"] * said["block_count"],
            dtype=None,
            quantization_config=None,
        )
    except (KeyError, AttributeError):
        return None


def _differs_by_layer(value: Any) -> bool:
    return not isinstance(value, int | float)
