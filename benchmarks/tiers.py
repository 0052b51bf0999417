"""What tiers of the KV cache cost and save.

    python -m benchmarks.tiers [--model FOLDER] [--json FILE]

*Steps*: the scheduler alone, 256 requests that decode, without a tier and with one whose copies cost nothing. *Load*: a
prompt of 2,048 tokens that the device has forgotten, from host memory and from a disk that the page cache has, beside computing
it and beside memcpy, which copies the same bytes. All of one run on one machine: compare within it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.scheduler import BLOCK_SIZE, CONTEXT, NUM_BLOCKS, TOKEN_BUDGET, add_all, random_prompts
from tandem.cluster.models.store import prepare_model
from tandem.cluster.saving import write_json
from tandem.engine.cache.groups import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.request import Request
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import (
    ConnectorContext,
    EvictionPolicy,
    KVCacheMemory,
    TierConfig,
    TransferConfig,
)
from tandem.kvtransfer.multi import create_connector
from tandem.kvtransfer.offload.manager import SlotManager, TierManager
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.spec import Copy, Mover, Tier
from tandem.kvtransfer.offload.worker_half import TierWorker
from tandem.wire.sampling import SamplingParams

RUNNING = 256
PROMPT, ANSWER = 512, 128
TIER_SLOTS = 6000
LOADED_TOKENS = 2048
REPEATS = 3
PATIENCE_S = 120.0


class TierFigures(msgspec.Struct):
    step_us: dict[str, float] = {}  # median
    compute_s: float = 0.0  # the prompt's first token, without a tier
    load_s: dict[str, float] = {}  # the prompt's first token, from each tier
    memcpy_s: float = 0.0  # the same bytes
    loaded_bytes: int = 0


class FreeMover(Mover):
    """Copies nothing, at once."""

    stored_bytes = 0
    loaded_bytes = 0

    def __init__(self) -> None:
        self._jobs: list[int] = []

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        self._jobs += [copy.job for copy in (*stores, *loads)]

    def take_ended(self) -> dict[int, bool]:
        jobs, self._jobs = self._jobs, []
        return dict.fromkeys(jobs, True)

    def wait(self, jobs: Iterable[int]) -> None: ...
    def close(self) -> None: ...


class FreeTier:
    name = "free"

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        return SlotManager(TIER_SLOTS, self._policy), FreeMover()


def median_step(policy: EvictionPolicy | None) -> float:
    """Microseconds, of planning, the connector's two halves, and booking."""
    planner, worker = None, None
    if policy is not None:
        tier = Tier(FreeTier(policy), 1)
        planner = TierScheduler(BLOCK_SIZE, tier)
        context = ConnectorContext("n", 1, "127.0.0.1", BLOCK_SIZE, TransferConfig(), lambda: None)
        worker = TierWorker(context, tier)
        worker.register_kv_caches(KVCacheMemory(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 1), "m", 1, 1, 9))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=TOKEN_BUDGET),
        CacheConfig(block_size=BLOCK_SIZE),
        [KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, (0,))],
        NUM_BLOCKS,
        CONTEXT,
        connector=planner,
    )
    add_all(scheduler, random_prompts(RUNNING, PROMPT), ANSWER)
    seconds = []
    while scheduler.has_unfinished_requests():
        started = time.perf_counter()
        step = scheduler.schedule()
        if worker is not None and step.connector_metadata is not None:
            worker.bind_connector_metadata(step.connector_metadata)
            worker.start_load_kv()
            worker.wait_for_save()
        requests, sampled = scheduler.requests, {}
        for request_id in step.num_scheduled_tokens:
            request = requests[request_id]
            if request.num_computed_tokens >= request.num_tokens:
                sampled[request_id] = [7]
        told = worker.get_finished(step.finished_req_ids) if worker is not None else None
        scheduler.update_from_output(step, ModelOutput(sampled), told)
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e6


class OneModel:
    """An engine with a real model."""

    def __init__(self, model: str, tiers: list[TierConfig]) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_model_len=LOADED_TOKENS + 64, step_target_ms=0)
        cache = CacheConfig(memory_bytes=1 << 30, hash_seed="x", tiers=tiers)
        self.runner = load_runner(ModelConfig(path=model, device="cpu"), cache, config)
        info = self.runner.info
        self._woken = threading.Event()
        planner, worker = None, None
        if tiers:
            context = ConnectorContext(
                "n", 1, "127.0.0.1", BLOCK_SIZE, TransferConfig(), self._woken.set,
                has_peers=False, tiers=tiers, groups=info.groups,
            )  # fmt: skip
            planner, worker = create_connector(context)
        self.scheduler = Scheduler(
            config, cache, info.groups, info.num_blocks, info.max_model_len, connector=planner
        )
        self.engine = Engine(self.scheduler, self.runner, worker)
        self._count = 0

    def first_token(self, prompt: list[int]) -> float:
        """Seconds; when it returns no block is held, and the device's cache is empty."""
        self._count += 1
        request = Request(f"r{self._count}", prompt, SamplingParams(max_tokens=1, temperature=0.0))
        started = time.perf_counter()
        self.engine.add_request(request)
        seconds = 0.0
        while not self.scheduler._state.cache.reset_prefix_cache() or not seconds:
            self._woken.clear()
            result = self.engine.step()
            if result.updates:
                seconds = time.perf_counter() - started
            if not result.progressed and not self.scheduler.has_work():
                self._woken.wait(PATIENCE_S)
        return seconds


def memcpy_seconds(size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(model: str) -> TierFigures:
    figures = TierFigures()
    for name, policy in (("no tier", None), *((policy.value, policy) for policy in EvictionPolicy)):
        figures.step_us[name] = min(median_step(policy) for _ in range(REPEATS))
    prompt = random_prompts(1, LOADED_TOKENS)[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, tiers in (
            ("", []),
            ("cpu", [TierConfig(cpu=256 << 20)]),
            ("disk", [TierConfig(disk=folder, size=256 << 20)]),
        ):
            one = OneModel(model, tiers)
            first = [one.first_token(prompt) for _ in range(REPEATS + 1)]
            if not name:
                figures.compute_s = min(first)
                continue
            figures.load_s[name] = min(first[1:])
            assert one.engine.worker is not None
            (status,) = one.engine.worker.stats().tiers
            figures.loaded_bytes = status.loaded_bytes // REPEATS
            one.engine.shutdown()
    figures.memcpy_s = memcpy_seconds(figures.loaded_bytes)
    return figures


def show(figures: TierFigures, console: Console) -> None:
    table = Table(box=None)
    for column in ("", "", "beside"):
        table.add_column(column)
    alone = figures.step_us["no tier"]
    for name, step in figures.step_us.items():
        table.add_row(f"a step at {RUNNING} running, {name}", f"{step:.0f} µs", f"{step / alone:.2f} ×")
    table.add_row(f"{LOADED_TOKENS} tokens computed", f"{figures.compute_s * 1e3:.0f} ms", "")
    for name, seconds in figures.load_s.items():
        table.add_row(
            f"{LOADED_TOKENS} tokens from {name}",
            f"{seconds * 1e3:.1f} ms",
            f"{figures.compute_s / seconds:.0f} × faster than computing, {figures.memcpy_s / seconds:.2f} of memcpy's rate",
        )
    table.add_row(
        f"memcpy of the same {figures.loaded_bytes >> 20} MiB", f"{figures.memcpy_s * 1e3:.1f} ms", ""
    )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(prepare_model(arguments.model, lambda what, share: None).path)
    show(figures, Console())
    if arguments.json:
        write_json(figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
