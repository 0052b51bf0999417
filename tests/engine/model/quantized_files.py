"""Writes quantized checkpoints of a tiny model in the layouts of the usual tools, and the ordinary checkpoint with the same weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

Parts = dict[str, torch.Tensor]
GROUP = 32
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def config(**options: Any) -> LlamaConfig:
    wanted: dict[str, Any] = {
        "vocab_size": 131, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**(wanted | options))


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs [N, M] into int32 [N, M * bits / 32], in order."""
    parts = codes.view(codes.shape[0], -1, 32 // bits).int() << torch.arange(0, 32, bits, dtype=torch.int32)
    return parts.sum(-1, dtype=torch.int32)


def _by_group(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [O, I], zero points and scales [O, groups]."""
    parts = weight.float().view(weight.shape[0], -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, (1 << bits) - 1)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, (1 << bits) - 1)
    return codes.flatten(1).int(), zeros.int(), scales


def _exact(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    spread = [part.repeat_interleave(group, dim=1) for part in (zeros, scales)]
    return (codes - spread[0]).float() * spread[1]


def fp8(weight: torch.Tensor, block: tuple[int, int] | None, *, rows: bool = False) -> tuple[Parts, torch.Tensor]:
    name = "weight_scale_inv" if block else "weight_scale"
    outputs, inputs = weight.shape
    size = block or ((1, inputs) if rows else (outputs, inputs))
    scales = torch.zeros(-(-outputs // size[0]), -(-inputs // size[1]))
    rounded, right = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn), torch.zeros(outputs, inputs)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = (slice(row * size[0], (row + 1) * size[0]), slice(column * size[1], (column + 1) * size[1]))
            scales[row, column] = weight[at].abs().max() / 448
            rounded[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
            right[at] = rounded[at].float() * scales[row, column]
    parts = {"weight": rounded, name: scales.reshape(()) if not block and not rows else scales}
    return parts, right


def gptq(
    weight: torch.Tensor, bits: int, group: int, *, first_format: bool, shuffled: bool = False
) -> tuple[Parts, torch.Tensor]:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if shuffled else torch.arange(inputs)
    codes, zeros, scales = _by_group(weight[:, order], bits, group)
    right, unordered = torch.zeros_like(weight), torch.zeros_like(codes)
    right[:, order] = _exact(codes, zeros, scales, group)
    unordered[:, order] = codes
    groups = torch.zeros(inputs, dtype=torch.int32)
    groups[order] = (torch.arange(inputs) // group).int()
    parts = {
        "qweight": pack_rows(unordered, bits).t().contiguous(),
        "qzeros": pack_rows((zeros - int(first_format)).t().contiguous(), bits),
        "scales": scales.t().contiguous().half(),
        "g_idx": groups,
    }
    return parts, right


def awq(weight: torch.Tensor, group: int) -> tuple[Parts, torch.Tensor]:
    codes, zeros, scales = _by_group(weight, 4, group)

    def packed(values: torch.Tensor) -> torch.Tensor:  # [N, outputs]
        return pack_rows(values.view(len(values), -1, 8)[:, :, _AWQ].flatten(1), 4)

    parts = {
        "qweight": packed(codes.t().contiguous()),
        "qzeros": packed(zeros.t().contiguous()),
        "scales": scales.t().contiguous().half(),
    }
    return parts, _exact(codes, zeros, scales, group)


def packed(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Parts, torch.Tensor]:
    codes, zeros, scales = _by_group(weight, bits, group)
    if symmetric:
        middle = 1 << (bits - 1)
        parts_of = weight.float().view(weight.shape[0], -1, group)
        scales = (parts_of.abs().amax(-1) / (middle - 1)).half().float()
        codes = ((parts_of / scales[..., None]).round() + middle).flatten(1).int()
        zeros = torch.full_like(zeros, middle)
    parts = {
        "weight_packed": pack_rows(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack_rows(zeros.t().contiguous(), bits).t().contiguous()
    return parts, _exact(codes, zeros, scales, group)


def int8(weight: torch.Tensor, _group: int) -> tuple[Parts, torch.Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    codes = (weight.float() / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, int], tuple[Parts, torch.Tensor]]]] = {
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        lambda weight, _: fp8(weight, (128, 128)),
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda weight, _: fp8(weight, None)),
    "compressed-fp8-rows": (
        _compressed(num_bits=8, type="float", strategy="channel"),
        lambda weight, _: fp8(weight, None, rows=True),
    ),
    "compressed-int8": (_compressed(num_bits=8, type="int", strategy="channel"), int8),
    "compressed-4bit": (
        _compressed(num_bits=4, type="int", strategy="group", group_size=GROUP),
        lambda weight, group: packed(weight, 4, group, symmetric=True),
    ),
    "compressed-4bit-zeros": (
        _compressed(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        lambda weight, group: packed(weight, 4, group, symmetric=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        lambda weight, group: gptq(weight, 4, group, first_format=True),
    ),
    "gptq-8bit-v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda weight, group: gptq(weight, 8, group, first_format=False),
    ),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda weight, group: gptq(weight, 4, group, first_format=True, shuffled=True),
    ),
}


# Mixtures of experts whose checkpoints name an expert's matrices in either way, one with latents.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 192}),
    "three-experts": ("Qwen3MoeConfig", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
        "head_dim": 32}),
    "deepseek-v3": ("DeepseekV3Config", {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
        "first_k_dense_replace": 1}),
}  # fmt: skip


def mixture(name: str) -> Any:
    kind, more = MIXTURES[name]
    described = {key: value for key, value in config().to_dict().items() if key in _SHARED}
    return getattr(transformers, kind)(**(described | more))


_SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHARED += ("max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
_QUANTIZED = re.compile(r"(_proj|experts\.\d+\.w[123])\.weight$")


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, of: str = "", **options: Any
) -> tuple[Path, Path]:
    """Saves both, and returns the folders of the quantized and of the ordinary checkpoint. `of`: one of MIXTURES instead of a Llama."""
    torch.manual_seed(0)
    written, quantize = FORMATS[name]
    described = mixture(of) if of else config(**options)
    model = AutoModelForCausalLM.from_config(described).to(dtype)
    ordinary, quantized = folder / "ordinary", folder / "quantized"
    model.save_pretrained(ordinary)
    tensors: Parts = {}
    right: Parts = {}
    for key, tensor in load_file(ordinary / "model.safetensors").items():
        if not _QUANTIZED.search(key):
            tensors[key] = right[key] = tensor
            continue
        parts, numbers = quantize(tensor.float(), GROUP)
        right[key] = numbers.to(dtype)
        tensors |= {f"{key.removesuffix('weight')}{part}": values for part, values in parts.items()}
    save_file(right, ordinary / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    read = json.loads((ordinary / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(read | {"quantization_config": written}))
    return quantized, ordinary
