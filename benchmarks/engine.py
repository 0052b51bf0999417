"""The engine alone: prefill and decode steps, compared with the machine's limit and, if it is installed, with vLLM.

    python -m benchmarks.engine MODEL [--vllm DIR] [--threads N] [--quick] [--json FILE]

MODEL is a local folder; DIR is a virtual environment with vLLM. All engines get the same cores and the same random prompts, and whole engine
steps are timed: scheduling, forward pass, sampling, bookkeeping.

The limit of a prefill is the time that its matrix products take at the machine's measured rate. The limit of a decode step is that, or if it is
longer the time to read all weights and all requests' KV once at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.lib.costs import Costs, read_costs
from benchmarks.lib.engines import EngineBench, load_engine, random_prompts
from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.machine import MachineLimits, measure_limits
from benchmarks.lib.processes import output_of
from benchmarks.lib.tables import table_of
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.machine.resources import usable_cores

PREFILLS = (128, 512, 2048)
DECODES = tuple((batch, context) for context in (128, 1024, 4096) for batch in (1, 4, 8, 32))
QUICK_DECODES = ((1, 128), (8, 128), (1, 1024), (8, 1024))
MAX_MODEL_LEN = 4608
MAX_BATCHED_TOKENS = 2048
VLLM_WITHIN_S = 3600.0
COLUMNS = {
    "step": "{what}",
    "tandem ms": "{tandem_ms:.1f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "limit ms": "{limit_ms:.1f}",
    "x limit": "{over_limit:.2f}",
    "vllm ms": "{vllm_ms:.1f}",
    "vllm / tandem": "{vllm_over_tandem:.2f}",
}

Times = dict[str, float]
"""Seconds by step: "prefill 512", "decode 8 x 1024" (requests and their contexts)."""


class Work(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    repeats: int  # of each prefill
    decode_steps: int
    prefill: list[list[int]]  # prompts, each alone
    decode: list[list[list[int]]]  # batches of prompts, each as long as its context


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a local model folder")
    parser.add_argument("--vllm", help="a virtual environment with vLLM, to run beside")
    parser.add_argument("--threads", type=int, default=0, help="cores for every side; all by default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", type=int, help="bytes for our KV cache")
    parser.add_argument("--general", action="store_true", help="through transformers, not the native library")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    options = parser.parse_args()
    threads = options.threads or usable_cores()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    times, work, costs = measure_tandem(options, threads)
    say("the machine's limits")
    limits = measure_limits(getattr(torch, work.dtype), torch.device("cpu"), threads)
    peer = measure_vllm(options.vllm, work, cores) if options.vllm else {}
    rows = [row(what, seconds, limits, costs, peer.get(what)) for what, seconds in times.items()]
    figures = {"threads": threads, "dtype": work.dtype, "limits": limits, "rows": rows}
    title = f"{Path(work.model).name}, {work.dtype}, {threads} cores; limits {limits}"
    return report(options, figures, table_of(title, rows, dict(list(COLUMNS.items())[: None if peer else 5])))


def measure_tandem(options: argparse.Namespace, threads: int) -> tuple[Times, Work, Costs]:
    decodes = QUICK_DECODES if options.quick else DECODES
    cache = CacheConfig(prefix_caching=False, memory_bytes=options.kv_memory)
    scheduling = SchedulerConfig(
        max_num_seqs=max(batch for batch, _ in decodes),
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        step_target_ms=0,  # all requests of a batch must have begun before the first one ends
    )
    model = ModelConfig(path=options.model, dtype=options.dtype, device="cpu", threads=threads)
    say("tandem: loading")
    engine, runner = load_engine(model, cache, scheduling, native=not options.general)
    info, prefills = runner.info, PREFILLS[: 2 if options.quick else None]
    work = Work(
        model=options.model,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=scheduling.max_num_seqs,
        repeats=2 if options.quick else 5,
        decode_steps=8 if options.quick else 24,
        prefill=[random_prompts(1, length, info.vocab_size)[0] for length in prefills],
        decode=[random_prompts(batch, context, info.vocab_size) for batch, context in decodes],
    )
    times, bench = Times(), EngineBench(engine)
    for prompt in work.prefill:
        say(f"tandem: prefill of {len(prompt)}")
        taken = [bench.prefill(prompt) for _ in range(work.repeats + 1)]
        times[f"prefill {len(prompt)}"] = statistics.median(taken[1:])
    for prompts in work.decode:
        say(f"tandem: {len(prompts)} decodes at {len(prompts[0])}")
        times[_decode(prompts)] = bench.decode(prompts, work.decode_steps)
    kv_bytes = runner.kv_cache[0].nbytes // cache.block_size * len(info.groups)
    return times, work, read_costs(Path(options.model), getattr(torch, info.dtype), kv_bytes)


def _decode(prompts: Sequence[Sequence[int]]) -> str:
    return f"decode {len(prompts)} x {len(prompts[0])}"


def measure_vllm(folder: str, work: Work, cores: list[int]) -> Times:
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
    }
    command = [f"{folder}/bin/python", str(Path(__file__).with_name("engine_vllm.py"))]
    say("vllm: starting; it compiles for minutes")
    times = Times()
    for line in output_of(command, VLLM_WITHIN_S, environment, msgspec.json.encode(work)).splitlines():
        try:  # it prints much else
            times |= msgspec.json.decode(line, type=Times)
        except msgspec.MsgspecError:
            continue
    return times


def row(what: str, seconds: float, limits: MachineLimits, costs: Costs, theirs: float | None) -> dict[str, Any]:
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
        "vllm_ms": None if theirs is None else theirs * 1e3,
        "vllm_over_tandem": None if theirs is None else theirs / seconds,
    }


if __name__ == "__main__":
    run(main)
