"""The engine alone: prefill and decode steps, compared with the machine's limit.

    python -m benchmarks.engine MODEL [--threads N] [--quick] [--json FILE]

MODEL is a local folder. Prompts are random, and whole engine steps are timed: scheduling, forward pass, sampling, bookkeeping.

The limit of a step is the time that its matrix products take at the machine's measured rate, or if it is longer the time to read all weights and
all requests' KV once at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.costs import Costs, read_costs
from benchmarks.lib.engines import EngineBench, TimedStep, load_engine
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
    steps, dtype, costs = measure_tandem(options, threads)
    say("the machine's limits")
    limits = measure_limits(getattr(torch, dtype), torch.device("cpu"), threads)
    rows = [row(step, limits, costs) for step in steps]
    figures = {"threads": threads, "dtype": dtype, "limits": limits, "rows": rows}
    title = f"{Path(options.model).name}, {dtype}, {threads} cores; limits {limits}"
    return report(options, figures, table_of(title, rows, COLUMNS))


def measure_tandem(options: argparse.Namespace, threads: int) -> tuple[list[TimedStep], str, Costs]:
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
    info, bench = runner.info, EngineBench(engine, runner.info.vocab_size)
    lengths, repeats, steps = (PREFILLS[:2], 2, 8) if options.quick else (PREFILLS, 5, 24)
    timed = []
    for step in chain(bench.prefills(lengths, repeats), bench.decodes(decodes, steps)):
        say(f"{step.what}: {step.seconds * 1e3:.1f} ms")
        timed.append(step)
    kv_bytes = runner.kv_cache[0].nbytes // cache.block_size * len(info.groups)
    return timed, info.dtype, read_costs(Path(options.model), getattr(torch, info.dtype), kv_bytes)


def row(step: TimedStep, limits: MachineLimits, costs: Costs) -> dict[str, Any]:
    limit = costs.least_seconds(step.counts, step.contexts, limits)
    return {
        "what": step.what,
        "tandem_ms": step.seconds * 1e3,
        "tokens_per_s": sum(step.counts) / step.seconds,
        "limit_ms": limit * 1e3,
        "over_limit": step.seconds / limit,
    }


if __name__ == "__main__":
    run(main)
