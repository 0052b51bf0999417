"""What several ranks cost a step: telling them what to compute, and what they sum and gather, compared with a step of one rank.

Runs a small model with random weights, many requests that decode, and real processes. On a machine with fewer cores than ranks the ranks take
turns on a core, so only `telling` is meaningful there: the time that rank 0 takes to write a step's arrays and to wake the others.

    python -m benchmarks.parallel [--requests 256] [--context 512] [--widths 1 2] [--vllm DIR]

`--vllm DIR` is an environment with vLLM 0.32. Its multiprocessing executor then tells the same number of workers a step of the same requests.
The workers compute nothing and answer with a token for each. There the scheduler's process writes and reads; here rank 0 computes, so no answer
comes back.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.engine_tandem import EngineBench
from tandem.base.errors import InternalError
from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wide.shard import Collectives, Lead
from tandem.engine.scheduling.scheduler import Scheduler
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
        self._inner.broadcast(tensor)  # not timed: ranks on a CPU need none


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
    """The costs of one decode step: medians, except for collectives, which are a mean."""

    width: int
    step_ms: float
    telling_us: float = 0.0
    told_bytes: int = 0
    collectives: int = 0
    collectives_ms: float = 0.0


def save_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


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


class TellingOfVllm(msgspec.Struct):
    """Seconds of one step, as medians."""

    telling: float
    answered: float  # until the first worker's answer has come


def measure_vllm(environment: Path, folder: Path, width: int, requests: int) -> TellingOfVllm:
    script = Path(__file__).with_name("parallel_vllm.py")
    command = [str(environment / "bin" / "python"), str(script), str(folder), str(width), str(requests)]
    done = subprocess.run(command, capture_output=True, timeout=_VLLM_S, check=False)
    if done.returncode:
        raise SystemExit(f"vLLM's executor did not run: {done.stderr.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=TellingOfVllm)


def _step_seconds(config: EngineConfig, runner: TorchRunner, requests: int, context: int) -> float:
    info = runner.info
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        groups=info.groups,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        connector=None,
    )
    draw = random.Random(1)
    prompts = [[draw.randrange(10, 4000) for _ in range(context)] for _ in range(requests)]
    return EngineBench(Engine(scheduler, runner, None)).decode(prompts, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vllm", type=Path, help="an environment that has vLLM 0.32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        print(
            f"{options.requests} requests at {options.context} tokens, one token each a step; load {os.getloadavg()[0]:.1f}"
        )
        for width in options.widths:
            costs = measure(folder, width, options.requests, options.context)
            if width == 1:
                print(f"1 rank: step {costs.step_ms:.1f} ms")
                continue
            print(
                f"{width} ranks: step {costs.step_ms:.1f} ms; telling {costs.telling_us:.0f} us for {costs.told_bytes:,} bytes; "
                f"{costs.collectives} sums and gathers {costs.collectives_ms:.1f} ms, waiting for other ranks in them"
            )
            if options.vllm is not None:
                peer = measure_vllm(options.vllm, folder, width, options.requests)
                print(
                    f"vLLM's executor, {width} workers: telling {1e6 * peer.telling:.0f} us, "
                    f"until the answer is here {1e6 * peer.answered:.0f} us"
                )


if __name__ == "__main__":
    main()
