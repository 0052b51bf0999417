"""What recurrent layers cost: a hybrid model of about 100M parameters, compared with a dense model of that size and with transformers.

    python -m benchmarks.hybrid [--tokens 2048] [--threads N] [--dtype bfloat16] [--json FILE]

Both models have random weights, and are saved to a folder and loaded like any checkpoint. Tandem's times are of whole engine steps: a prompt in
one step, then decodes. Transformers' times are of its forward pass over the prompt, and of its decodes one by one. All take turns and medians
count, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from benchmarks.lib.engines import EngineBench, load_engine, random_prompts, save_random_model
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import at_most, table_of
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.caches import cache_parameter
from tandem.machine.resources import usable_cores

VOCAB = 32_000
CONTEXT, DECODES = 256, 24  # tokens
FLOOR = 1.5  # the most that a hybrid's prompt may take, in times of a dense model's
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "head_dim": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
COLUMNS = {
    "model": "{model}",
    "parameters": "{parameters:.0f}M",
    "prompt ms": "{prompt_ms:.0f}",
    "of the dense": "{of_dense:.2f}x",
    "decode ms": "{decode_ms:.1f}",
}


def configurations() -> dict[str, Any]:
    """Three of four layers of the hybrid are recurrent, as in Qwen3.5."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 3
    hybrid = transformers.Qwen3_5TextConfig(
        **SHARED,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        intermediate_size=2048,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    dense = transformers.Qwen3Config(**SHARED, num_hidden_layers=len(kinds), intermediate_size=2304)
    return {"hybrid": hybrid, "dense": dense}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="cores for every side")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options)
    title = f"{options.tokens} tokens, {options.dtype}, {options.threads} cores"
    floors = [at_most("the hybrid's prompt, of the dense model's", rows[0]["of_dense"], FLOOR, "×")]
    return report(options, rows, table_of(title, rows, COLUMNS), floors=floors)


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    (prompt,) = random_prompts(1, options.tokens, VOCAB)
    scheduling = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=options.tokens, max_model_len=options.tokens + 64
    )
    cache = CacheConfig(block_size=16, memory_bytes=512 << 20, prefix_caching=False)
    models, benches = {}, {}
    for name, config in configurations().items():
        models[name] = save_random_model(config, folder / name, options.dtype)
        described = ModelConfig(path=str(folder / name), dtype=options.dtype, device="cpu", threads=options.threads)
        benches[name] = EngineBench(load_engine(described, cache, scheduling)[0])
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)  # seconds of the prompt, and of a decode
    for _ in range(options.rounds + 1):  # the first warms up
        for name, bench in benches.items():
            taken[name].append((bench.prefill(prompt), bench.decode([prompt[:CONTEXT]], DECODES)))
            torch.set_num_threads(options.threads)
            taken[f"{name}, transformers"].append(_transformers(models[name], prompt))
    medians = {name: tuple(map(statistics.median, zip(*runs[1:], strict=True))) for name, runs in taken.items()}
    sizes = {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}
    return [
        {
            "model": name,
            "parameters": sizes[name.partition(",")[0]] / 1e6,
            "prompt_ms": 1e3 * whole,
            "of_dense": whole / medians["dense"][0],
            "decode_ms": 1e3 * decode,
        }
        for name, (whole, decode) in medians.items()
    ]


@torch.inference_mode()
def _transformers(model: Any, prompt: list[int]) -> tuple[float, float]:
    """Returns the seconds for the prompt, and per token after 256 of its tokens."""
    name = cache_parameter(inspect.signature(model.forward).parameters) or ""

    def forward(tokens: list[int], cache: DynamicCache) -> float:
        start = time.perf_counter()
        model(input_ids=torch.tensor([tokens]), logits_to_keep=1, **{name: cache})
        return time.perf_counter() - start

    whole = forward(prompt, DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    forward(prompt[:CONTEXT], cache)
    return whole, statistics.median(forward([token], cache) for token in prompt[:DECODES])


if __name__ == "__main__":
    run(main)
