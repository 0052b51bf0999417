"""Reads common models' configurations without transformers.

transformers takes 2.2 to 2.5 s of CPU and 106 MiB for it in each node (`import` and `AutoConfig.from_pretrained`, besides torch, on a
two-core machine, three runs); this file takes 1 ms. Nodes that start together share the cores, so two of them would serve about 2.5 s
later. Caching transformers' result in a file would help only a second start on the same machine. Tests compare this file with
transformers' own reading of published configurations and of variations.

`read_plain_config` returns None for a configuration with anything that it does not know, and transformers then reads it. What it
returns equals transformers' reading in everything that the native library needs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType

_Count = Annotated[int, Meta(gt=0)]
_Theta = Annotated[float, Meta(gt=0)]
_Dtype = Literal["float32", "bfloat16", "float16"]

# These keys do not change the forward pass.
_OF_NO_CONSEQUENCE = frozenset(
    [
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "initializer_range",
        "is_llama_config",
        "max_window_layers",
        "pad_token_id",
        "pretraining_tp",
        "rope_interleaved",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)


class _Rope(msgspec.Struct, forbid_unknown_fields=True):
    rope_theta: _Theta
    rope_type: Literal["default"]


class _ConfigJson(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """config.json. A default here is the default of every type that is read, or has no effect in it."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    max_position_embeddings: _Count
    rms_norm_eps: Annotated[float, Meta(gt=0)]
    hidden_act: Literal["silu"]
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None
    head_dim: _Count | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: _Rope | UnsetType = UNSET
    rope_theta: _Theta | UnsetType = UNSET
    rope_scaling: None = None
    sliding_window: _Count | UnsetType | None = UNSET
    use_sliding_window: Literal[False] = False  # Qwen: with False the window is not used
    layer_types: list[Literal["full_attention"]] | UnsetType | None = UNSET
    dtype: _Dtype | UnsetType = UNSET
    torch_dtype: _Dtype | UnsetType = UNSET
    quantization_config: dict[str, Any] | None = None


class PlainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration with transformers' names of fields."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_id: int | list[int] | None
    rope_parameters: dict[str, Any]
    sliding_window: int | None
    layer_types: list[str] | None
    dtype: torch.dtype | None
    quantization_config: dict[str, Any] | None

    def get_text_config(self) -> PlainConfig:
        return self


def read_plain_config(content: dict[str, Any]) -> PlainConfig | None:
    """Reads the content of a config.json. Returns None if only transformers can read it."""
    try:
        written = msgspec.convert(
            {key: value for key, value in content.items() if key not in _OF_NO_CONSEQUENCE}, _ConfigJson
        )
    except msgspec.ValidationError:
        return None
    kind, theta = written.model_type, _theta(written)
    if theta is None or written.hidden_size % written.num_attention_heads:
        return None
    if UNSET not in (written.dtype, written.torch_dtype):
        return None
    # The types have different defaults for these, so they must be written.
    if kind == "qwen3" and written.head_dim is None:
        return None
    if kind == "mistral" and (written.sliding_window is UNSET or written.layer_types is not UNSET):
        return None  # with `layer_types`, even an empty one, it is not one of the plain types
    if kind == "llama" and written.sliding_window:
        return None
    if written.layer_types and len(written.layer_types) != written.num_hidden_layers:
        return None
    dtype = written.torch_dtype if written.dtype is UNSET else written.dtype
    named = {name: getattr(written, name) for name in PlainConfig.__struct_fields__ if hasattr(written, name)}
    return PlainConfig(
        **named
        | {
            "head_dim": written.head_dim or written.hidden_size // written.num_attention_heads,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "sliding_window": (written.sliding_window or None) if kind == "mistral" else None,
            "layer_types": None if kind == "mistral" else ["full_attention"] * written.num_hidden_layers,
            "dtype": None if dtype is UNSET else getattr(torch, dtype),
        }
    )


def _theta(written: _ConfigJson) -> float | None:
    """The rotary base, which is written in one of two places."""
    old, new = written.rope_theta, written.rope_parameters
    if isinstance(new, _Rope):
        return new.rope_theta if old is UNSET else None
    return None if isinstance(old, UnsetType) else old
