"""Writes checkpoints of tiny models with an encoder and a decoder, and asks transformers for their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

from tests.engine.model.tiny import Answer, generated

VOCAB = 131
_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "init_std": 0.3, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None, "use_cache": True,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "n_positions": 64,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "initializer_factor": 4.0,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartConfig", _BART),
    "bart-forced": ("BartConfig", _BART),
    "blenderbot": ("BlenderbotConfig", _BART),
    "blenderbot-small": ("BlenderbotSmallConfig", _BART),
    "marian": ("MarianConfig", _BART),
    "mbart": ("MBartConfig", _BART),
    "pegasus": ("PegasusConfig", _BART),
    "plbart": ("PLBartConfig", _BART),
    "t5": ("T5Config", _T5),
    "mt5": ("MT5Config", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5Config", _T5),
}


def save(name: str, folder: Path, **options: Any) -> Path:
    kind, settings = CONFIGS[name]
    config = getattr(transformers, kind)(**(settings | options))
    torch.manual_seed(3)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    model.generation_config.forced_bos_token_id = 5 if name == "bart-forced" else None
    path = folder / name
    model.save_pretrained(path)
    return path


def reference(path: Path, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """transformers' greedy answers after the opening, one prompt at a time, in float32."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    forced = int(model.generation_config.forced_bos_token_id is not None)
    answers = []
    for prompt in prompts:
        out = generated(model, prompt, forced + num_tokens)
        tokens = out.sequences[0, 1 + forced :].tolist()
        scores = torch.stack(out.logits[forced:])[:, 0].float().log_softmax(-1)
        answers.append(Answer(tokens, scores[torch.arange(num_tokens), tokens].tolist()))
    return answers
