"""Models with random weights, made on the machine that is measured, which may have no network."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM


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

    @property
    def num_parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocab * self.hidden


# Small, and with weights so large that the two best tokens are rarely close: rounding must not look like an error.
PARITY_SHAPE = ModelShape(256, 512, 4, 8, 2, 1000, 64, "float32", spread=0.12)
SPEED_SHAPES = {
    "tiny": ModelShape(256, 704, 4, 4, 2, 4096, 64),
    "1b": ModelShape(2048, 8192, 16, 32, 8, 32_000, 64),
    "8b": ModelShape(4096, 14_336, 32, 32, 8, 128_256, 128),
}


def make_model(shape: ModelShape, folder: Path, device: torch.device) -> Path:
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=16_384,
        initializer_range=shape.spread,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return folder
