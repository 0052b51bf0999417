"""Writes a GGUF file of Qwen3-1.7B's shape with random weights: four bits in Q4_K, the embedding in Q6_K, as llama.cpp's files have it.

    python -m benchmarks.random_gguf TOKENIZER FOLDER

FOLDER gets `random.gguf` and a `tokenizer.json`, so that `tandem serve FOLDER` serves it. TOKENIZER is the folder of a model whose byte-level
tokenizer it takes, SmolLM2 for example; tokens that the tokenizer lacks are filled up. Speed and memory depend on the shape alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 28, 2048, 6144, 16, 8, 128, 151_936
STD = 0.02

_Bytes = npt.NDArray[np.uint8]


def main(tokenizer: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(folder / "random.gguf", "qwen3")
    writer.add_name("random-1.7b")
    writer.add_context_length(40_960)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, tokenizer, folder)
    for name, rows, columns, kind in _matrices():
        make = _q6_k if kind is gguf.GGMLQuantizationType.Q6_K else _q4_k
        writer.add_tensor(name, make(rng, rows, columns), raw_dtype=kind)
    for name, size in _norms():
        writer.add_tensor(name, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices() -> list[tuple[str, int, int, gguf.GGMLQuantizationType]]:
    q4, q6 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    matrices = [("token_embd.weight", VOCAB, HIDDEN, q6)]
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate", INTERMEDIATE, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ):
            matrices.append((f"blk.{layer}.{name}.weight", rows, columns, q4))
    return matrices


def _norms() -> list[tuple[str, int]]:
    sizes = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
    layers = [(f"blk.{layer}.{name}.weight", size) for layer in range(LAYERS) for name, size in sizes.items()]
    return [*layers, ("output_norm.weight", HIDDEN)]


def _q4_k(rng: np.random.Generator, rows: int, columns: int) -> _Bytes:
    """A block: the step of scales, the step of least values, both, then 256 quants."""
    blocks = rng.integers(0, 256, (rows, columns // 256, 144), np.uint8)
    step = STD / 256
    blocks[..., :4] = np.array([step, 7.5 * step], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _q6_k(rng: np.random.Generator, rows: int, columns: int) -> _Bytes:
    """A block: 256 quants, then 16 scales and their step."""
    blocks = rng.integers(0, 256, (rows, columns // 256, 210), np.uint8)
    blocks[..., 192:208] = blocks[..., 192:208] % 8 + 8
    blocks[..., 208:] = np.array([STD / (11.5 * 18.5)], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, folder: Path) -> None:
    content: dict[str, Any] = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    vocabulary.update({f"filler{index}": index for index in range(len(vocabulary), VOCAB)})
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    special = {each["id"] for each in content["added_tokens"]}
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(VOCAB)]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
