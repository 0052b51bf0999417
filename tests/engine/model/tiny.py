"""Writes checkpoints of tiny models with random weights, one per architecture."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 131
WINDOW = 9

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
    # Large enough that the two best tokens are never almost equal.
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _config(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(**{**COMMON, **options})


_HYBRID = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig", tie_word_embeddings=True),
    "llama-untied-odd-heads": _config("LlamaConfig", hidden_size=36, num_attention_heads=6, num_key_value_heads=3,
        head_dim=10),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral-window": _config("MistralConfig", sliding_window=WINDOW),
    "gemma2": _config("Gemma2Config", head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=12,
        attn_logit_softcapping=3.0, final_logit_softcapping=8.0),
    "gemma3": _config("Gemma3TextConfig", head_dim=8, sliding_window=WINDOW, num_hidden_layers=4,
        layer_types=_HYBRID),
    "phi3": _config("Phi3Config", sliding_window=WINDOW),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256,
        initializer_range=0.3, eos_token_id=2),
    "opt": lambda: transformers.OPTConfig(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, word_embed_proj_dim=32, init_std=0.3, eos_token_id=2),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": _config("Qwen3MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24),
    "gpt-oss": _config("GptOssConfig", head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"]),
    # The scale of its queries depends on `floor_scale`, beyond some thousand tokens.
    "llama4": _config("Llama4TextConfig", num_hidden_layers=4, head_dim=8, intermediate_size_mlp=48,
        num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=WINDOW, floor_scale=4),
    "gemma3n": _config("Gemma3nTextConfig", num_hidden_layers=4, head_dim=8, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=4, intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4),
    "falcon": lambda: transformers.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.3, eos_token_id=2, alibi=False),
    "deepseek-v2": _config("DeepseekV2Config", **{**LATENT, "q_lora_rank": None}),
    "deepseek-v3": _config("DeepseekV3Config", **LATENT),
}  # fmt: skip

_LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": _LINEAR, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

# Models that keep recurrent states, alone or beside attention.
RECURRENT: dict[str, Callable[[], Any]] = {
    "qwen3-next": _config("Qwen3NextConfig", head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, **_DELTA),
    "qwen3.5": _config("Qwen3_5TextConfig", head_dim=8, **_DELTA),
    "mamba": _config("MambaConfig", state_size=8, conv_kernel=4, expand=2, time_step_rank=4),
    "mamba2": _config("Mamba2Config", state_size=8, num_heads=8, head_dim=8, expand=2, n_groups=2, chunk_size=4),
    "falcon-mamba": _config("FalconMambaConfig", state_size=8, conv_kernel=4, expand=2, time_step_rank=4),
    "jamba": _config("JambaConfig", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=8,
        mamba_dt_rank=4, use_mamba_kernels=False),
    "bamba": _config("BambaConfig", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=4),
    "falcon-h1": _config("FalconH1Config", mamba_d_ssm=32, mamba_n_heads=8, mamba_d_head=4, mamba_d_state=8,
        mamba_n_groups=2, mamba_chunk_size=4),
    "granite-hybrid": _config("GraniteMoeHybridConfig", layer_types=["mamba", "attention"], mamba_n_heads=8,
        mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=4, num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=24),
    "nemotron-h": _config("NemotronHConfig", num_hidden_layers=4, layers_block_type=["mamba", "attention", "mlp",
        "moe"], head_dim=8, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=4,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, moe_shared_expert_intermediate_size=24),
    "kimi-linear": _config("KimiLinearConfig", num_hidden_layers=4, layer_types=_LINEAR, num_key_value_heads=4,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, linear_num_heads=4, linear_head_dim=8,
        num_experts=4, num_experts_per_token=2, moe_intermediate_size=24, first_k_dense_replace=1),
    "zamba": _config("ZambaConfig", num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=8, mamba_dt_rank=4, n_mamba_heads=2, num_key_value_heads=4, attention_head_dim=16),
    "zamba2": _config("Zamba2Config", num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=2, chunk_size=4, num_key_value_heads=4,
        attention_head_dim=16, num_mem_blocks=1),
    "recurrent-gemma": _config("RecurrentGemmaConfig", num_hidden_layers=3, lru_width=32, attention_window_size=9,
        head_dim=8),
    "lfm3": _config("Lfm3Config", num_hidden_layers=4),
    "lfm2-moe": _config("Lfm2MoeConfig", num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"],
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1),
    "qwen3.5-moe": _config("Qwen3_5MoeTextConfig", head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, **_DELTA),
    "lfm2": _config("Lfm2Config", num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"]),
    "olmo-hybrid": _config("OlmoHybridConfig", **{**_DELTA, "linear_num_key_heads": 4}),
    "minimax": _config("MiniMaxConfig", head_dim=8, layer_types=["linear_attention", "full_attention"],
        num_local_experts=4, num_experts_per_tok=2, block_size=4),
}  # fmt: skip
ALL = ARCHITECTURES | RECURRENT


def build(architecture: str) -> PreTrainedModel:
    torch.manual_seed(hash_of(architecture))
    model = AutoModelForCausalLM.from_config(ALL[architecture](), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # Some parameters are initialized to zeros or ones, which would hide that the code ignores them.
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


def generated(model: Any, prompt: list[int], num_tokens: int) -> Any:
    """What transformers generates greedily, with the logits of each token."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=num_tokens,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )  # fmt: skip


def reference(path: Path, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """transformers' greedy answers, one prompt at a time, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    answers = []
    for prompt in prompts:
        out = generated(model, prompt, num_tokens)
        logprobs = [float(logits.log_softmax(-1).max()) for logits in out.logits]
        answers.append(Answer(out.sequences[0, len(prompt) :].tolist(), logprobs))
    return answers


Case = tuple[Path, list[list[int]], list[Answer]]


def case_of(name: str, folder: Path, num_tokens: int) -> Case:
    """A model, prompts of which the last begins as another, and transformers' answers."""
    path, rng = save(name, folder), random.Random(name)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 23, 37)]
    prompts.append(prompts[2][:30] + prompts[1][:6])
    return path, prompts, reference(path, prompts, num_tokens)
