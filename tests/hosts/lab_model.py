"""Makes a model for tests that are not about the model: random weights, little to compute, much KV for each token."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
# 8 layers of keys and values, 4 heads of 64 values of 4 bytes.
KV_BYTES_PER_TOKEN = 8 * 2 * 4 * 64 * 4


def make_tiny_model(folder: Path, seed: int = 20260704) -> Path:
    """Writes a Llama checkpoint: the same bytes for the same seed, and the same tokenizer for every seed."""
    if (folder / "config.json").exists():
        return folder
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        # So large that the two best tokens are never almost equal, and the whole prompt decides between them.
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
    ).save_pretrained(folder)
    return folder
