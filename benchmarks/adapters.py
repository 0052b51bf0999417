"""What adapters cost: a decode step of eight requests, each with its own adapter, compared with the same step without adapters.

    python -m benchmarks.adapters [--adapters 8] [--rank 16] [--threads N] [--dtype bfloat16] [--rounds 5] [--json FILE]

The model has SmolLM2's shape and random weights and runs through transformers (the general path). Adapters are for all its linear layers, in
PEFT's format. The engines take turns and medians count, so that other work on the machine affects all alike. The benchmark also counts how
often the kernels' threads meet in a step, which does not depend on other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from benchmarks.lib.engines import EngineBench, load_engine, random_prompts, save_random_model
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import at_most, table_of
from tandem.base.errors import Unavailable
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.fused.cpu_attention import CpuAttention
from tandem.machine.resources import usable_cores
from tandem.wire.adapters import identity_of

VOCAB, CONTEXT, DECODES = 49_152, 256, 24
CEILING = 1.3  # the most that a step with all adapters may take, in steps without adapters
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COLUMNS = {
    "": "{requests}",
    "ms": "{ms:.1f}",
    "the least": "{least_ms:.1f}",
    "of the model alone": "{of_base:.2f}",
    "meetings of threads": "{meetings}",
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options)
    title = f"a decode step of {options.adapters} requests, rank {options.rank}, {options.dtype}"
    floors = [at_most("one adapter each, of the model alone", rows[-1]["of_base"], CEILING, "×")]
    return report(options, rows, table_of(f"{title}, {options.threads} threads", rows, COLUMNS), floors=floors)


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = folder / "model"
    made = save_random_model(config, model, options.dtype)
    adapters = {
        f"a{number}": str(write_adapter(folder / f"a{number}", made, options.rank, number))
        for number in range(options.adapters)
    }
    alone, alone_met, _ = bench_of(model, {}, options)
    both, both_met, loras = bench_of(model, adapters, options)
    prompts = random_prompts(options.adapters, CONTEXT, VOCAB)
    kinds: dict[str, tuple[EngineBench, Callable[[], int], list[str]]] = {
        "the model alone": (alone, alone_met, []),
        "adapters served, none asked for": (both, both_met, []),
        "one adapter each": (both, both_met, loras),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, (bench, _met, wanted) in kinds.items():
            times[name].append(bench.decode(prompts, DECODES, wanted))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return [
        {
            "requests": name,
            "ms": 1e3 * medians[name],
            "least_ms": 1e3 * min(times[name]),
            "of_base": medians[name] / medians["the model alone"],
            "meetings": meetings(bench, met, prompts, wanted),
        }
        for name, (bench, met, wanted) in kinds.items()
    ]


def meetings(bench: EngineBench, met: Callable[[], int], prompts: list[list[int]], loras: list[str]) -> int:
    """Returns how often the kernels' threads meet in one more step."""
    counts = [met()]
    for steps in (DECODES, DECODES + 10):
        bench.decode(prompts, steps, loras)
        counts.append(met())
    return (counts[2] - counts[1] - (counts[1] - counts[0])) // 10


def bench_of(
    model: Path, adapters: dict[str, str], options: argparse.Namespace
) -> tuple[EngineBench, Callable[[], int], list[str]]:
    """Returns an engine, a counter of how often its kernels' threads have met, and the adapters that it serves."""
    described = ModelConfig(
        path=str(model), dtype=options.dtype, threads=options.threads, adapters=adapters, max_lora_rank=options.rank
    )
    cache = CacheConfig(memory_bytes=512 << 20, prefix_caching=False)
    # All prompts are processed in chunks of one length, so that all runs have equally many steps.
    scheduling = SchedulerConfig(max_model_len=1024, max_loras=len(adapters), step_target_ms=0)
    engine, runner = load_engine(described, cache, scheduling, native=False)
    served = runner.adapters.served if runner.adapters is not None else {}
    attention = getattr(runner.forward, "attention", None)
    if not isinstance(attention, CpuAttention):
        why = "this measures our CPU kernels, which do not run here: `python -m tandem.kernels.build` says why"
        raise Unavailable(why)
    return (EngineBench(engine), lambda: attention.pieces.meetings, [identity_of(*one) for one in served.items()])


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


if __name__ == "__main__":
    run(main)
