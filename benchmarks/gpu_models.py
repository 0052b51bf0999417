"""Models with random weights, made on the machine that is measured, which may have no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors.torch import load_file, save_file

_FP8_BLOCK = 128


class ModelShape(msgspec.Struct, frozen=True):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int
    dtype: str = "bfloat16"
    spread: float = 0.02  # of the weights
    kind: str = "Llama"  # the beginning of the names of transformers' classes
    more: dict[str, Any] = {}  # further words of its configuration
    fp8: bool = False  # matrices of layers in FP8, with a scale for each block of 128 x 128


# Small, and with weights so large that the two best tokens are rarely close: rounding must not look like an error.
PARITY_SHAPE = ModelShape(256, 512, 4, 8, 2, 1000, 64, "float32", spread=0.12)
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 99,  # no experts
}
SPEED_SHAPES = {
    "tiny": ModelShape(256, 704, 4, 4, 2, 4096, 64),
    "1b": ModelShape(2048, 8192, 16, 32, 8, 32_000, 64),
    "8b": ModelShape(4096, 14_336, 32, 32, 8, 128_256, 128),
    "qwen3-8b": ModelShape(4096, 12_288, 36, 32, 8, 151_936, 128, kind="Qwen3"),
    # Layers of Qwen3-30B-A3B, a quarter of them.
    "experts": ModelShape(2048, 6144, 12, 32, 4, 151_936, 128, kind="Qwen3Moe", more=_EXPERTS),
    "fp8": ModelShape(4096, 14_336, 32, 32, 8, 128_256, 128, fp8=True),
    # The attention of DeepSeek-V2-Lite and V3's.
    "latents": ModelShape(2048, 10_944, 16, 16, 16, 102_400, 64, kind="DeepseekV3", more=_LATENT),
}
# The same kinds for a dry run.
DRY_SHAPES = {
    "tiny": SPEED_SHAPES["tiny"],
    "1b": SPEED_SHAPES["tiny"],
    "8b": SPEED_SHAPES["tiny"],
    "qwen3-8b": ModelShape(128, 256, 2, 4, 2, 512, 64, kind="Qwen3"),
    "experts": ModelShape(128, 256, 2, 4, 2, 512, 64, kind="Qwen3Moe", more=_FEW_EXPERTS),
    "fp8": ModelShape(128, 256, 2, 4, 2, 512, 64, fp8=True),
    "latents": ModelShape(128, 256, 2, 4, 4, 512, 64, kind="DeepseekV3", more=_LATENT),
}


def make_model(shape: ModelShape, folder: Path, device: torch.device) -> Path:
    """Makes the model if it is not in the folder already."""
    finished = folder / "made"
    if finished.exists():
        return folder
    made: Any = getattr(transformers, f"{shape.kind}Config")
    words: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 40_960,
        "initializer_range": shape.spread,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = made(**words | shape.more)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with device:
            model = getattr(transformers, f"{shape.kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder, max_shard_size="100GB")
    if shape.fp8:
        _round_matrices(folder)
    finished.touch()
    return folder


def _round_matrices(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        rows, columns = (-(-size // _FP8_BLOCK) for size in weight.shape)
        scale = float(weight.abs().max()) / 448
        tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((rows, columns), scale)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
