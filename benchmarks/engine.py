"""The engine alone: prefill and decode steps, compared with the machine's limit and, if it is installed, with vLLM.

    python -m benchmarks.engine MODEL [--vllm DIR] [--threads N] [--quick] [--json FILE]

MODEL is a local folder; DIR is a virtual environment with vLLM. All engines get the same cores and the same random prompts, and whole engine
steps are timed: scheduling, forward pass, sampling, bookkeeping.

The limit of a prefill is the time that its matrix products take at the machine's measured rate. The limit of a decode step is that, or if it is
longer the time to read all weights and all requests' KV once at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_costs import (
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    Costs,
    Times,
    Work,
    random_work,
    read_costs,
)
from benchmarks.engine_tandem import Say, run_tandem
from benchmarks.machine import MachineLimits, measure_limits
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.machine.resources import usable_cores

PREFILLS = (128, 512, 2048)
DECODES = tuple((batch, context) for context in (128, 1024, 4096) for batch in (1, 4, 8, 32))
QUICK_DECODES = ((1, 128), (8, 128), (1, 1024), (8, 1024))


def main() -> None:
    arguments = _arguments()
    threads = arguments.threads or usable_cores()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    console = Console(stderr=True)

    def say(what: str) -> None:
        console.print(what, highlight=False)

    times, work, costs = measure_tandem(arguments, threads, say)
    say("the machine's limits")
    limits = measure_limits(getattr(torch, work.dtype), torch.device("cpu"), threads)
    peer = measure_vllm(arguments.vllm, work, cores, say) if arguments.vllm else None
    rows = compare(times, peer, limits, costs)
    figures = {"threads": threads, "dtype": work.dtype, "limits": msgspec.to_builtins(limits), "rows": rows}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    Console().print(
        table_of(rows, f"{Path(work.model).name}, {work.dtype}, {threads} cores; {_said(limits)}")
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a local model folder")
    parser.add_argument("--vllm", help="a virtual environment with vLLM, to run beside")
    parser.add_argument("--threads", type=int, default=0, help="cores for every side; all by default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", type=int, help="bytes for our KV cache")
    parser.add_argument("--general", action="store_true", help="through transformers, not the native library")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--json", help="a file for the figures")
    return parser.parse_args()


def measure_tandem(arguments: argparse.Namespace, threads: int, say: Say) -> tuple[Times, Work, Costs]:
    decodes = QUICK_DECODES if arguments.quick else DECODES
    cache = CacheConfig(prefix_caching=False, memory_bytes=arguments.kv_memory)
    scheduler = SchedulerConfig(
        max_num_seqs=max(batch for batch, _ in decodes),
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        step_target_ms=0,  # all requests of a batch must have begun before the first one ends
    )
    model = ModelConfig(path=arguments.model, dtype=arguments.dtype, device="cpu", threads=threads)
    say("tandem: loading")
    runner = load_runner(model, cache, scheduler, native=not arguments.general)
    info = runner.info
    work = random_work(
        arguments.model,
        info.dtype,
        info.vocab_size,
        info.max_model_len,
        PREFILLS[:2] if arguments.quick else PREFILLS,
        decodes,
        repeats=2 if arguments.quick else 5,
        decode_steps=8 if arguments.quick else 24,
    )
    engine = Engine(
        Scheduler(scheduler, cache, info.groups, info.num_blocks, info.max_model_len), runner, None
    )
    times = run_tandem(engine, work, say)
    kv_bytes = runner.kv_cache[0].numel() * runner.kv_cache.element_size() // cache.block_size
    return (
        times,
        work,
        read_costs(Path(arguments.model), getattr(torch, info.dtype), kv_bytes * len(info.groups)),
    )


def measure_vllm(folder: str, work: Work, cores: list[int], say: Say) -> Times:
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
    }
    command = [f"{folder}/bin/python", str(Path(__file__).with_name("engine_vllm.py"))]
    say("vllm: starting; it compiles for minutes")
    times = Times({}, {})
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile("w+") as complaints:
        asked.write(msgspec.json.encode(work))
        asked.seek(0)
        run = subprocess.Popen(
            command, env=environment, stdin=asked, stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        for line in run.stdout or ():
            row = _result(line)
            if "prefill" in row:
                times.prefill[row["prefill"]] = row["seconds"]
                say(f"vllm: prefill of {row['prefill']}")
            elif "decode" in row:
                batch, context = row["decode"]
                times.decode[batch, context] = row["seconds"]
                say(f"vllm: {batch} decodes at {context}")
        if run.wait() != 0:
            complaints.seek(0)
            sys.exit("vLLM ended with an error:\n" + "".join(complaints.readlines()[-20:]))
    return times


def _result(line: str) -> dict[str, Any]:
    """Returns the result in a line of vLLM's output, which prints much else."""
    if not line.startswith("{"):
        return {}
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return row


def compare(ours: Times, peer: Times | None, limits: MachineLimits, costs: Costs) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(what: str, tokens: int, seconds: float, limit: float, theirs: float | None) -> None:
        rows.append(
            {
                "what": what,
                "tandem_ms": seconds * 1e3,
                "tokens_per_s": tokens / seconds,
                "limit_ms": limit * 1e3,
                "over_limit": seconds / limit,
                "vllm_ms": None if theirs is None else theirs * 1e3,
                "vllm_over_tandem": None if theirs is None else theirs / seconds,
            }
        )

    for length, seconds in ours.prefill.items():
        flops = costs.prefill_flops(length)
        theirs = peer.prefill.get(length) if peer else None
        row(f"prefill {length}", length, seconds, flops / limits.gemm_flops, theirs)
    for (batch, context), seconds in ours.decode.items():
        flops, read = costs.decode_flops(batch, context), costs.decode_bytes(batch, context)
        limit = max(flops / limits.gemm_flops, read / limits.read_bytes)
        theirs = peer.decode.get((batch, context)) if peer else None
        row(f"decode {batch} x {context}", batch, seconds, limit, theirs)
    return rows


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    beside = any(row["vllm_ms"] is not None for row in rows)
    columns = [
        "step",
        "tandem ms",
        "tokens/s",
        "limit ms",
        "x limit",
        *(["vllm ms", "vllm / tandem"] if beside else []),
    ]
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        cells = [
            row["what"],
            f"{row['tandem_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['limit_ms']:.1f}",
            f"{row['over_limit']:.2f}",
        ]
        if beside and row["vllm_ms"] is not None:
            cells += [f"{row['vllm_ms']:.1f}", f"{row['vllm_over_tandem']:.2f}"]
        table.add_row(*cells)
    return table


def _said(limits: MachineLimits) -> str:
    return f"limits {limits.gemm_flops / 1e9:.0f} GFLOP/s, {limits.read_bytes / 1e9:.1f} GB/s"


if __name__ == "__main__":
    main()
