"""Writes GGUF files of tiny models as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_TYPES = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


def write_gguf(
    source: Path,
    target: Path,
    kind: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantize: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> None:
    """`metadata` are further keys, or None for one that is left out; those of the architecture without its name, those
    of others with a leading dot. `quantize` says of tensors, by the end of their names, how they are stored."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, kind)
    for key, value in (_sizes(config) | (metadata or {})).items():
        if value is not None:
            name = key.removeprefix(".") if key.startswith(".") else f"{kind}.{key}"
            getattr(writer, _TYPES[type(value)])(name, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    for name, data in (_weights(source, config, kind) | (tensors or {})).items():
        ends = [how for end, how in (quantize or {}).items() if name.endswith(end)]
        if ends:
            writer.add_tensor(name, gguf.quants.quantize(data, ends[0]), raw_dtype=ends[0])
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {
        "context_length": 256, "embedding_length": config["hidden_size"], "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": head,
        "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]), "vocab_size": config["vocab_size"]
    }  # fmt: skip
    if "rms_norm_eps" in config:
        return sizes | {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
    return sizes | {"attention.layer_norm_epsilon": config["norm_epsilon"]}


def _weights(source: Path, config: dict[str, Any], kind: str) -> dict[str, np.ndarray]:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        data = tensor.numpy()
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Interleave the two halves that a rotation turns together.
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        weights[theirs] = data
    return weights


def llama3_factors(head: int, rope: dict[str, Any]) -> np.ndarray:
    """The tensor `rope_freqs.weight` that the converter makes of llama3's rope_parameters."""
    factors = []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for frequency in 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head)):
        wavelength = 2 * math.pi / float(frequency)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
