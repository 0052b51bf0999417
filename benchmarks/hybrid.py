"""What recurrent layers cost: a hybrid model of about 100M parameters, compared with a dense model of that size and with transformers.

    python -m benchmarks.hybrid [--tokens 2048] [--threads N] [--dtype bfloat16] [--json FILE]

Both models have random weights, and are saved to a folder and loaded like any checkpoint. Tandem's times are of whole engine steps: a prompt in
one step, then decodes. Transformers' times are of its forward pass over the prompt, and of its decodes one by one. All take turns and medians
count, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.engine_tandem import EngineBench
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.caches import cache_parameter
from tandem.engine.model.loading import load_runner
from tandem.engine.scheduling.scheduler import Scheduler
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


def main() -> None:
    arguments = _arguments()
    threads = arguments.threads or usable_cores()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    chance = random.Random(0)
    prompt = [chance.randrange(VOCAB) for _ in range(arguments.tokens)]
    figures: dict[str, Any] = {"threads": threads, "dtype": arguments.dtype, "tokens": arguments.tokens}
    with tempfile.TemporaryDirectory() as folder:
        paths, peers, benches = {}, {}, {}
        for name, config in configurations().items():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).to(getattr(torch, arguments.dtype)).eval()
            paths[name] = Path(folder) / name
            model.save_pretrained(paths[name])
            figures[f"{name} parameters"] = sum(weight.numel() for weight in model.parameters())
            benches[name] = EngineBench(_engine(paths[name], arguments.dtype, threads, arguments.tokens))
            peers[name] = model
        prefills: dict[str, list[float]] = {}
        decodes: dict[str, list[float]] = {}
        for _ in range(arguments.rounds + 1):  # the first warms up
            for name in paths:
                prefills.setdefault(name, []).append(benches[name].prefill(prompt))
                decodes.setdefault(name, []).append(benches[name].decode([prompt[:CONTEXT]], DECODES))
                torch.set_num_threads(threads)
                taken = _transformers(peers[name], prompt)
                prefills.setdefault(f"{name}, transformers", []).append(taken[0])
                decodes.setdefault(f"{name}, transformers", []).append(taken[1])
    figures["prefill_s"] = {name: statistics.median(taken[1:]) for name, taken in prefills.items()}
    figures["decode_s"] = {name: statistics.median(taken[1:]) for name, taken in decodes.items()}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    Console().print(_table(figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.hybrid", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--threads", type=int, default=0, help="cores for every side; all by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="a file for the figures")
    return parser.parse_args()


def _engine(path: Path, dtype: str, threads: int, tokens: int) -> Engine:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=tokens, max_model_len=tokens + 64)
    cache = CacheConfig(block_size=16, memory_bytes=512 << 20, prefix_caching=False)
    model = ModelConfig(path=str(path), dtype=dtype, device="cpu", threads=threads)
    runner = load_runner(model, cache, config)
    info = runner.info
    return Engine(Scheduler(config, cache, info.groups, info.num_blocks, info.max_model_len), runner, None)


def _transformers(model: Any, prompt: list[int]) -> tuple[float, float]:
    """Returns the seconds for the prompt, and per token after 256 of its tokens."""
    name = cache_parameter(inspect.signature(model.forward).parameters) or ""
    with torch.inference_mode():
        start = time.perf_counter()
        model(
            input_ids=torch.tensor([prompt]),
            logits_to_keep=1,
            **{name: DynamicCache(config=model.config)},
        )
        whole = time.perf_counter() - start
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.tensor([prompt[:CONTEXT]]), logits_to_keep=1, **{name: cache})
        taken = []
        for token in prompt[:DECODES]:
            start = time.perf_counter()
            model(input_ids=torch.tensor([[token]]), **{name: cache})
            taken.append(time.perf_counter() - start)
    return whole, statistics.median(taken)


def _table(figures: dict[str, Any]) -> Table:
    title = f"{figures['tokens']} tokens, {figures['dtype']}, {figures['threads']} cores"
    table = Table("model", "parameters", "prompt, ms", "of the dense", "decode, ms", title=title)
    dense = figures["prefill_s"]["dense"]
    for name, taken in figures["prefill_s"].items():
        parameters = figures[f"{name.partition(',')[0]} parameters"] / 1e6
        share = f"{taken / dense:.2f}x" + (f" (floor {FLOOR}x)" if name == "hybrid" else "")
        table.add_row(
            name, f"{parameters:.0f}M", f"{1e3 * taken:.0f}", share, f"{1e3 * figures['decode_s'][name]:.1f}"
        )
    return table


if __name__ == "__main__":
    main()
