"""Tiny models with random weights, one per architecture, saved as checkpoints so that they load like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 131
WINDOW = 9

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that the two best tokens are never almost equal.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(**{**_COMMON, **options})


_HYBRID = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig", tie_word_embeddings=True),
    "llama-untied-odd-heads": _config(
        "LlamaConfig", hidden_size=36, num_attention_heads=6, num_key_value_heads=3, head_dim=10
    ),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral-window": _config("MistralConfig", sliding_window=WINDOW),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=8,
        sliding_window=WINDOW,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig", head_dim=8, sliding_window=WINDOW, num_hidden_layers=4, layer_types=_HYBRID
    ),
    "phi3": _config("Phi3Config", sliding_window=WINDOW),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        eos_token_id=2,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        init_std=0.3,
        eos_token_id=2,
    ),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": _config(
        "Qwen3MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt-oss": _config(
        "GptOssConfig",
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek-v3": _config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
}


def build(architecture: str) -> PreTrainedModel:
    torch.manual_seed(hash_of(architecture))
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # Some parts begin as zeros or ones, which would hide that they are left out.
        if parameter.std() == 0 or parameter.isnan().any() or "sinks" in name:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.2)
    return model.eval()


def save(architecture: str, folder: Path) -> Path:
    path = folder / architecture
    build(architecture).save_pretrained(path)
    return path


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]


def hash_of(text: str) -> int:
    return sum(ord(character) * 31**index for index, character in enumerate(text)) % 2**31


def reference(path: Path, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """What transformers generates greedily, one prompt at a time, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = [float(logits.log_softmax(-1).max()) for logits in out.logits]
        answers.append(Answer(out.sequences[0, len(prompt) :].tolist(), logprobs))
    return answers
