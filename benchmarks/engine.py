"""The engine alone: prefill and decode steps, compared with the machine's limit.

    python -m benchmarks.engine MODEL [--threads N] [--quick] [--json FILE]

MODEL is a local folder. Prompts are random, and whole engine steps are timed: scheduling, forward pass, sampling, bookkeeping.

The limit of a prefill is the time that its matrix products take at the machine's measured rate. The limit of a decode step is that, or if it is
longer the time to read all weights and all requests' KV once at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.costs import Costs, read_costs
from benchmarks.lib.engines import EngineBench, load_engine, random_prompts
from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.machine import MachineLimits, measure_limits
from benchmarks.lib.tables import table_of
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.machine.resources import usable_cores

PREFILLS = (128, 512, 2048)
DECODES = tuple((batch, context) for context in (128, 1024, 4096) for batch in (1, 4, 8, 32))
QUICK_DECODES = ((1, 128), (8, 128), (1, 1024), (8, 1024))
MAX_MODEL_LEN = 4608
MAX_BATCHED_TOKENS = 2048
COLUMNS = {
    "step": "{what}",
    "tandem ms": "{tandem_ms:.1f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "limit ms": "{limit_ms:.1f}",
    "x limit": "{over_limit:.2f}",
}

Times = dict[str, float]
"""Seconds by step: "prefill 512", "decode 8 x 1024" (requests and their contexts)."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a local model folder")
    parser.add_argument("--threads", type=int, default=0, help="cores; all by default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", type=int, help="bytes for our KV cache")
    parser.add_argument("--general", action="store_true", help="through transformers, not the native library")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    options = parser.parse_args()
    threads = options.threads or usable_cores()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    times, dtype, costs = measure_tandem(options, threads)
    say("the machine's limits")
    limits = measure_limits(getattr(torch, dtype), torch.device("cpu"), threads)
    rows = [row(what, seconds, limits, costs) for what, seconds in times.items()]
    figures = {"threads": threads, "dtype": dtype, "limits": limits, "rows": rows}
    title = f"{Path(options.model).name}, {dtype}, {threads} cores; limits {limits}"
    return report(options, figures, table_of(title, rows, COLUMNS))


def measure_tandem(options: argparse.Namespace, threads: int) -> tuple[Times, str, Costs]:
    decodes = QUICK_DECODES if options.quick else DECODES
    cache = CacheConfig(prefix_caching=False, memory_bytes=options.kv_memory)
    scheduling = SchedulerConfig(
        max_num_seqs=max(batch for batch, _ in decodes),
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        step_target_ms=0,  # all requests of a batch must have begun before the first one ends
    )
    model = ModelConfig(path=options.model, dtype=options.dtype, device="cpu", threads=threads)
    say("loading")
    engine, runner = load_engine(model, cache, scheduling, native=not options.general)
    info, prefills = runner.info, PREFILLS[: 2 if options.quick else None]
    repeats, steps = (2, 8) if options.quick else (5, 24)
    times, bench = Times(), EngineBench(engine)
    for length in prefills:
        say(f"prefill of {length}")
        (prompt,) = random_prompts(1, length, info.vocab_size)
        taken = [bench.prefill(prompt) for _ in range(repeats + 1)]
        times[f"prefill {length}"] = statistics.median(taken[1:])
    for batch, context in decodes:
        say(f"{batch} decodes at {context}")
        prompts = random_prompts(batch, context, info.vocab_size)
        times[f"decode {batch} x {context}"] = bench.decode(prompts, steps)
    kv_bytes = runner.kv_cache[0].nbytes // cache.block_size * len(info.groups)
    return times, info.dtype, read_costs(Path(options.model), getattr(torch, info.dtype), kv_bytes)


def row(what: str, seconds: float, limits: MachineLimits, costs: Costs) -> dict[str, Any]:
    kind, size, *context = what.replace(" x ", " ").split()
    if kind == "prefill":
        limit = costs.prefill_flops(int(size)) / limits.gemm_flops
    else:
        flops, read = (find(int(size), int(context[0])) for find in (costs.decode_flops, costs.decode_bytes))
        limit = max(flops / limits.gemm_flops, read / limits.read_bytes)
    return {
        "what": what,
        "tandem_ms": seconds * 1e3,
        "tokens_per_s": int(size) / seconds,
        "limit_ms": limit * 1e3,
        "over_limit": seconds / limit,
    }


if __name__ == "__main__":
    run(main)
