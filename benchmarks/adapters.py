"""What adapters cost: a decode step of eight requests, each with its own adapter, compared with the same step without adapters.

    python -m benchmarks.adapters [--adapters 8] [--rank 16] [--threads N] [--dtype bfloat16] [--rounds 5] [--json FILE]

The model has SmolLM2's shape and random weights and runs through transformers (the general path). Adapters are for all its linear layers, in
PEFT's format. The engines take turns and medians count, so that other work on the machine affects all alike. The benchmark also counts how
often the kernels' threads meet in a step, which does not depend on other work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.engine_tandem import EngineBench
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.attention.cpu import CpuAttention
from tandem.engine.model.loading import load_runner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.machine.resources import usable_cores
from tandem.wire.adapters import identity_of

CONTEXT, DECODES = 256, 24
CEILING = 1.3  # the most that a step with all adapters may take, in steps without adapters
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options)
    print_table(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = folder / "model"
    config = transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    made.save_pretrained(model)
    adapters = {
        f"a{number}": str(write_adapter(folder / f"a{number}", made, options.rank, number))
        for number in range(options.adapters)
    }
    alone, alone_met, loras = engine_of(model, {}, 0, options)
    assert not loras
    both, both_met, loras = engine_of(model, adapters, options.adapters, options)
    rng = random.Random(0)
    prompts = [[rng.randrange(49_152) for _ in range(CONTEXT)] for _ in range(options.adapters)]
    kinds: dict[str, tuple[EngineBench, Callable[[], int], list[str]]] = {
        "the model alone": (alone, alone_met, []),
        "adapters served, none asked for": (both, both_met, []),
        "one adapter each": (both, both_met, loras),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, (bench, _met, wanted) in kinds.items():
            times[name].append(bench.decode(prompts, DECODES, wanted))
    meetings = {}
    for name, (bench, met, wanted) in kinds.items():
        before = met()
        bench.decode(prompts, DECODES, wanted)
        shorter = met()
        bench.decode(prompts, DECODES + 10, wanted)
        meetings[name] = (met() - shorter - (shorter - before)) // 10
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    base = seconds["the model alone"]
    return {
        "adapters": options.adapters, "rank": options.rank, "dtype": options.dtype, "threads": options.threads,
        "ms": {name: 1e3 * taken for name, taken in seconds.items()},
        "least_ms": {name: 1e3 * min(taken) for name, taken in times.items()},
        "meetings": meetings,
        "of_base": {name: taken / base for name, taken in seconds.items()},
        "ceiling": CEILING,
    }  # fmt: skip


def engine_of(
    model: Path, adapters: dict[str, str], max_loras: int, options: argparse.Namespace
) -> tuple[EngineBench, Callable[[], int], list[str]]:
    """Returns an engine, a counter of how often its kernels' threads have met, and the adapters that it serves."""
    cache = CacheConfig(memory_bytes=512 << 20, prefix_caching=False)
    # All prompts are processed in chunks of one length, so that all runs have equally many steps.
    scheduler = SchedulerConfig(max_model_len=1024, max_loras=max_loras, step_target_ms=0)
    runner = load_runner(
        ModelConfig(
            path=str(model),
            dtype=options.dtype,
            threads=options.threads,
            adapters=adapters,
            max_lora_rank=options.rank,
        ),
        cache,
        scheduler,
        native=False,
    )
    info = runner.info
    made = Scheduler(scheduler, cache, info.groups, info.num_blocks, info.max_model_len)
    served = runner.adapters.served if runner.adapters is not None else {}
    attention = runner.forward.attention
    if not isinstance(attention, CpuAttention):
        raise SystemExit(
            "this measures our CPU kernels, which do not run here: `python -m tandem.kernels.build` says why"
        )
    bench = EngineBench(Engine(made, runner, None))
    return bench, lambda: attention.pieces.meetings, [identity_of(*one) for one in served.items()]


def write_adapter(folder: Path, model: torch.nn.Module, rank: int, seed: int) -> Path:
    random_numbers = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS and isinstance(module, torch.nn.Linear):
            for side, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                key = f"base_model.model.{name}.lora_{side}.weight"
                tensors[key] = torch.randn(shape, generator=random_numbers) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def print_table(found: dict[str, Any]) -> None:
    table = Table(
        title=f"a decode step of {found['adapters']} requests, rank {found['rank']}, {found['dtype']}, {found['threads']} threads"
    )
    for column in ("", "ms", "the least", "of the model alone", "at most", "meetings of threads"):
        table.add_column(column)
    for name, taken in found["ms"].items():
        limit = f"{found['ceiling']}" if name == "one adapter each" else ""
        least, met = found["least_ms"][name], found["meetings"][name]
        table.add_row(name, f"{taken:.1f}", f"{least:.1f}", f"{found['of_base'][name]:.2f}", limit, str(met))
    Console().print(table)


if __name__ == "__main__":
    main()
