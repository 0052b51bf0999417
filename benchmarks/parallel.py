"""What several ranks cost a step: telling them what to compute, and what they sum and gather, compared with a step of one rank.

Runs a small model with random weights, many requests that decode, and real processes. On a machine with fewer cores than ranks the ranks take
turns on a core, so only `telling` is meaningful there: the time that rank 0 takes to write a step's arrays and to wake the others.

    python -m benchmarks.parallel [--requests 256] [--context 512] [--widths 1 2] [--vllm DIR] [--json FILE]

`--vllm DIR` is an environment with vLLM 0.32. Its multiprocessing executor then tells the same number of workers a step of the same requests.
The workers compute nothing and answer with a token for each. There the scheduler's process writes and reads; here rank 0 computes, so no answer
comes back.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.lib.engines import EngineBench, engine_of, random_prompts, save_random_model
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import output_of
from benchmarks.lib.tables import table_of
from tandem.base.errors import InternalError
from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.shard import Collectives, Lead
from tandem.engine.model.torch_runner import TorchRunner
from tandem.node.ranks.processes import shares_of
from tandem.node.ranks.supervisor import Ranks

STEPS = 100
_SILENCE_S = 30.0  # long, because the machine may be busy and no rank must count as lost here
_VLLM_S = 600.0  # for vLLM's executor, its start and end included


class TimedCollectives:
    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.seconds: list[float] = []

    def sum(self, tensor: torch.Tensor) -> None:
        began = time.perf_counter()
        self._inner.sum(tensor)
        self.seconds.append(time.perf_counter() - began)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        gathered = self._inner.gather(tensor)
        self.seconds.append(time.perf_counter() - began)
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._inner.broadcast(tensor)  # not timed, as what follows: ranks on a CPU need none

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._inner.send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._inner.receive(tensor, rank)


class TimedLead:
    def __init__(self, inner: Lead, collectives: TimedCollectives) -> None:
        self._inner, self._collectives = inner, collectives
        self.seconds: list[float] = []
        self.began: list[int] = []  # collectives before each step
        self.bytes = 0

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        self.bytes = sum(array.nbytes for array in arrays)
        self.began.append(len(self._collectives.seconds))
        began = time.perf_counter()
        self._inner.send(arrays)
        self.seconds.append(time.perf_counter() - began)

    def cause_of(self, error: Exception) -> Exception:
        return self._inner.cause_of(error)


class WidthCosts(msgspec.Struct):
    """The costs of one decode step: medians, except for collectives, which are a mean. Of the time in sums and gathers the most is waiting for
    other ranks."""

    ranks: int
    step_ms: float
    telling_us: float | None = None
    told_bytes: int | None = None
    collectives: int | None = None
    collectives_ms: float | None = None
    vllm_telling_us: float | None = None
    vllm_answered_us: float | None = None


COLUMNS = {
    "ranks": "{ranks}",
    "step ms": "{step_ms:.1f}",
    "telling µs": "{telling_us:.0f}",
    "bytes": "{told_bytes:,}",
    "sums and gathers": "{collectives}",
    "ms": "{collectives_ms:.1f}",
    "vLLM's telling µs": "{vllm_telling_us:.0f}",
    "until its answer µs": "{vllm_answered_us:.0f}",
}


def save_model(folder: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    save_random_model(config, folder)


def measure(folder: Path, width: int, requests: int, context: int) -> WidthCosts:
    threads = max(1, len(os.sched_getaffinity(0)) // width)
    kv_bytes = 4 * 2 * 4 * 32 * 4 * (context + STEPS + 2 * requests + 64) * requests
    config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype="float32", device="cpu", threads=threads),
        cache=CacheConfig(memory_bytes=max(64 << 20, kv_bytes), prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=requests, max_num_batched_tokens=2048, step_target_ms=0),
    )
    if width == 1:
        runner = load_runner(config.model, config.cache, config.scheduler, native=False)
        return WidthCosts(1, 1000 * _step_seconds(config, runner, requests, context))
    ranks = Ranks(
        "benchmark",
        width,
        config,
        shares_of([], threads * width, width),
        LogsConfig(),
        silence_s=_SILENCE_S,
        lost=print,
    )
    try:
        shard = ranks.start()
        if shard.lead is None:
            raise InternalError("rank 0 leads")
        adding = TimedCollectives(shard.collectives)
        lead = TimedLead(shard.lead, adding)
        shard = dataclasses.replace(shard, lead=lead, collectives=adding)
        runner = load_runner(config.model, config.cache, config.scheduler, shard=shard)
        ranks.await_ready()
        step = _step_seconds(config, runner, requests, context)
        in_steps = adding.seconds[lead.began[-STEPS] :]
        return WidthCosts(
            width,
            1000 * step,
            1e6 * statistics.median(lead.seconds[-STEPS:]),
            lead.bytes,
            len(in_steps) // STEPS,
            1000 * sum(in_steps) / STEPS,
        )
    finally:
        ranks.stop()


def measure_vllm(environment: Path, folder: Path, width: int, requests: int) -> tuple[float, float]:
    """Returns the microseconds of one step: of telling the workers, and until the first one's answer has come."""
    script = Path(__file__).with_name("parallel_vllm.py")
    command = [str(environment / "bin" / "python"), str(script), str(folder), str(width), str(requests)]
    told = msgspec.json.decode(output_of(command, _VLLM_S).splitlines()[-1], type=dict[str, float])
    return 1e6 * told["telling"], 1e6 * told["answered"]


def _step_seconds(config: EngineConfig, runner: TorchRunner, requests: int, context: int) -> float:
    engine = engine_of(runner, config.cache, config.scheduler)
    return EngineBench(engine).decode(random_prompts(requests, context, 4000), STEPS)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vllm", type=Path, help="an environment that has vLLM 0.32")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        for width in options.widths:
            rows.append(measure(folder, width, options.requests, options.context))
            if options.vllm is not None and width > 1:
                peer = measure_vllm(options.vllm, folder, width, options.requests)
                rows[-1].vllm_telling_us, rows[-1].vllm_answered_us = peer
    title = f"{options.requests} requests at {options.context} tokens, one token each a step"
    table = table_of(f"{title}; load {os.getloadavg()[0]:.1f}", rows, COLUMNS, left=0)
    return report(options, rows, table)


if __name__ == "__main__":
    run(main)
