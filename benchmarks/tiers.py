"""What tiers of the KV cache cost and save.

    python -m benchmarks.tiers [--model FOLDER] [--trace FILE [--requests N] [--served N]] [--vllm DIR] [--json FILE]

*Steps*: the scheduler alone with 256 requests that decode, without a tier and with a tier whose copies cost nothing. *Load*: a prompt of 2,048
tokens that the device no longer has, from host memory and from a disk whose files are in the page cache, compared with computing it and with
memcpy of the same bytes. All figures of one run are of one machine: compare within a run.

*Replay*, with a trace in Mooncake's format: the trace's first requests go through the real scheduler, with a model that answers at once and copies
that cost nothing; shows how much of their prompts each layout found. A block of the trace is one of Tandem's. The device has room for a tenth of
the distinct blocks, the tier in host memory for three tenths, the one on disk for all.

*Served*: the first of these requests again, one after another, by a real engine: the time to first token, and how much is computed. `remote` are
two nodes that take turns, each with a tier of its own, and read the other's over NIXL.

*Managers*, with an environment that has vLLM 0.32: what `benchmarks.tier_parity` reports of both systems' bookkeeping, in the same run.

Each figure that has a floor is compared with it at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import subprocess
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

from benchmarks import tier_parity
from benchmarks.scheduler import BLOCK_SIZE, CONTEXT, NUM_BLOCKS, TOKEN_BUDGET, add_all, random_prompts
from benchmarks.tier_floors import LOADED_TOKENS, Served, TierFigures, floors, show_floors
from tandem.cluster.models.store import prepare_model
from tandem.cluster.saving import write_json
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.request import Request
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory, WorkerConnector
from tandem.kvtransfer.config import EvictionPolicy, TierConfig, TransferConfig
from tandem.kvtransfer.multi import MultiScheduler, MultiWorker, create_connector
from tandem.kvtransfer.offload.manager import SlotManager, TierManager
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.spec import Copy, Mover, Tier, create_tier
from tandem.kvtransfer.offload.worker_half import TierWorker
from tandem.loadgen.traces import TraceRow, read_trace
from tandem.wire.nodes import PeerAddress, new_epoch
from tandem.wire.requests import CachePeers, RequestFacts
from tandem.wire.sampling import SamplingParams

GROUPS = [KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, (0,))]
RUNNING = 256
PROMPT, ANSWER = 512, 128
TIER_SLOTS = 6000
REPEATS = 3
PATIENCE_S = 120.0


class FreeMover(Mover):
    """Copies nothing, and reports it done at once."""

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

    def __init__(self, policy: EvictionPolicy, slots: int = TIER_SLOTS) -> None:
        self._policy = policy
        self._slots = slots

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        return SlotManager(self._slots, self._policy), FreeMover()


def median_step(policy: EvictionPolicy | None) -> float:
    """Returns the microseconds of planning, the connector's two halves, and booking."""
    planner, worker = None, None
    if policy is not None:
        tier = Tier(FreeTier(policy), 1)
        planner = TierScheduler(GROUPS, tier)
        context = ConnectorContext("n", 1, "127.0.0.1", BLOCK_SIZE, TransferConfig(), lambda: None)
        worker = TierWorker(context, tier)
        worker.register_kv_caches(KVCacheMemory(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 1), "m", 1, 1, 9))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=TOKEN_BUDGET),
        CacheConfig(block_size=BLOCK_SIZE),
        GROUPS,
        NUM_BLOCKS,
        CONTEXT,
        connector=planner,
    )
    add_all(scheduler, random_prompts(RUNNING, PROMPT), ANSWER)
    seconds = []
    while scheduler.has_unfinished_requests():
        started = time.perf_counter()
        _step(scheduler, worker)
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e6


class OneModel:
    """An engine with a real model."""

    def __init__(
        self,
        model: str,
        tiers: list[TierConfig],
        *,
        name: str = "n",
        most_tokens: int = LOADED_TOKENS,
        num_blocks: int | None = None,
        shares: bool = False,
    ) -> None:
        """`shares` says whether other nodes may read its tier."""
        config = SchedulerConfig(max_num_seqs=4, max_model_len=most_tokens + 64, step_target_ms=0)
        cache = CacheConfig(memory_bytes=1 << 30, hash_seed="x", tiers=tiers, remote=shares)
        self.runner = load_runner(ModelConfig(path=model, device="cpu"), cache, config)
        info = self.runner.info
        self._woken = threading.Event()
        planner, worker, epoch = None, None, new_epoch()
        if tiers:
            context = ConnectorContext(
                name, epoch, "127.0.0.1", BLOCK_SIZE, TransferConfig(), self._woken.set,
                has_peers=False, tiers=tiers, groups=info.groups, remote=shares,
            )  # fmt: skip
            planner, worker = create_connector(context)
        self.scheduler = Scheduler(
            config, cache, info.groups, num_blocks or info.num_blocks, info.max_model_len, connector=planner
        )
        self.engine = Engine(self.scheduler, self.runner, worker)
        self.tier = PeerAddress(name, epoch, worker.tier_endpoint) if worker is not None else None
        self._count = 0

    def first_token(self, prompt: list[int]) -> float:
        """Returns the seconds to the first token. Afterwards no block is held and the device's cache is empty."""
        seconds = self.serve(prompt)
        while self.scheduler.stats().free_blocks < self.scheduler.stats().total_blocks:
            self.step()
        self.scheduler._state.cache.reset_prefix_cache()
        return seconds

    def serve(self, prompt: list[int], peer: OneModel | None = None) -> float:
        """Returns the seconds to the first token. The `peer`, which may have a part of the prompt, runs its steps meanwhile."""
        self._count += 1
        cache_peers = CachePeers(source=peer.tier) if peer is not None else None
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        started = time.perf_counter()
        self.engine.add_request(
            Request(
                f"r{self._count}",
                RequestFacts(prompt_token_ids=prompt, sampling=sampling),
                cache_peers=cache_peers,
            )
        )
        while not self.step(0.001 if peer is not None else PATIENCE_S):
            if peer is not None:
                peer.step(0.0)
        return time.perf_counter() - started

    def step(self, patience_s: float = PATIENCE_S) -> bool:
        """Returns whether there was something to report."""
        self._woken.clear()
        result = self.engine.step()
        if not result.progressed and not self.scheduler.has_work():
            self._woken.wait(patience_s)
        return bool(result.updates)


def copy_seconds(one: OneModel, config: TierConfig) -> float:
    """Returns the seconds from asking for a load of the prompt's blocks to its end, measured by the thread that copies."""
    info, cache = one.runner.info, one.runner.kv_cache
    ended = threading.Event()
    tier = create_tier(config)
    tier.open(KVCacheMemory(cache, info.content, info.num_layers, 1, info.vocab_size), ended.set)
    count = (LOADED_TOKENS - 1) // BLOCK_SIZE
    keys = [b"%032d" % number for number in range(count)]
    room = tier.manager.prepare_store(keys)
    assert room is not None
    blocks = list(range(1, count + 1))
    tier.mover.submit([Copy(0, blocks, room.slots, keys)], [])
    _await(tier, ended)
    seconds = []
    for job in range(1, 3 * REPEATS):
        started = time.perf_counter()
        tier.mover.submit([], [Copy(job, blocks, room.slots, keys)])
        _await(tier, ended)
        seconds.append(time.perf_counter() - started)
    tier.close()
    return min(seconds)


def _await(tier: Tier, ended: threading.Event) -> None:
    while not tier.mover.take_ended():
        ended.wait()
        ended.clear()


def replay(rows: Sequence[TraceRow]) -> dict[str, float]:
    """Returns, for each layout, the share of all prompt tokens that needed no computing."""
    prompts = [
        [block * BLOCK_SIZE + i for block in row.blocks for i in range(BLOCK_SIZE)]
        for row in rows
        if row.blocks
    ]
    distinct = len({block for row in rows for block in row.blocks})
    longest = max(map(len, prompts))
    device = max(distinct // 10, 2 * longest // BLOCK_SIZE)
    host, disk = 3 * distinct // 10, 4 * distinct
    layouts: dict[str, tuple[int, list[tuple[int, EvictionPolicy]]]] = {
        "no tier": (device, []),
        "cpu, lru": (device, [(host, EvictionPolicy.LRU)]),
        "cpu, arc": (device, [(host, EvictionPolicy.ARC)]),
        "cpu, arc, and disk": (device, [(host, EvictionPolicy.ARC), (disk, EvictionPolicy.LRU)]),
        "a device with room for all": (disk, []),
    }
    return {name: _found(prompts, *layout) for name, layout in layouts.items()}


def _found(prompts: list[list[int]], num_blocks: int, tiers: list[tuple[int, EvictionPolicy]]) -> float:
    context = ConnectorContext("n", 1, "127.0.0.1", BLOCK_SIZE, TransferConfig(), lambda: None)
    made = [Tier(FreeTier(policy, slots), 1) for slots, policy in tiers]
    planner = MultiScheduler([TierScheduler(GROUPS, tier) for tier in made], longest=True)
    worker = MultiWorker([TierWorker(context, tier) for tier in made])
    worker.register_kv_caches(KVCacheMemory(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 1), "m", 1, 1, 9))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=TOKEN_BUDGET),
        CacheConfig(block_size=BLOCK_SIZE),
        GROUPS,
        num_blocks,
        1 << 20,
        connector=planner,
    )
    waiting = list(enumerate(prompts))[::-1]
    while waiting or scheduler.has_unfinished_requests():
        while waiting and len(scheduler.requests) < 2:
            number, prompt = waiting.pop()
            sampling = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
            scheduler.add_request(
                Request(str(number), RequestFacts(prompt_token_ids=prompt, sampling=sampling))
            )
        _step(scheduler, worker)
    return 1 - scheduler.stats().prompt_tokens_computed / sum(map(len, prompts))


def serve_trace(model: str, rows: Sequence[TraceRow]) -> dict[str, Served]:
    """Returns the results by layout. A block of the trace is one of Tandem's, so prompts are short, as the machine is small."""
    rows = [row for row in rows if row.blocks]
    ids = {block: random.Random(block) for row in rows for block in row.blocks}
    tokens = {block: [draw.randrange(1000, 40_000) for _ in range(BLOCK_SIZE)] for block, draw in ids.items()}
    prompts = [[token for block in row.blocks for token in tokens[block]] for row in rows]
    longest = max(map(len, prompts))
    device = max(len(tokens) // 10, 2 * longest // BLOCK_SIZE)
    one = OneModel(model, [], most_tokens=longest)
    block_bytes = one.runner.kv_cache[0].nbytes
    served: dict[str, Served] = {}
    host, disk = 3 * len(tokens) // 10 * block_bytes, 2 * len(tokens) * (block_bytes + 4096)
    arc = TierConfig(cpu=host, policy=EvictionPolicy.ARC)
    with tempfile.TemporaryDirectory() as folder:
        for name, tiers, nodes in (
            ("no tier", [], 1),
            ("cpu, lru", [TierConfig(cpu=host)], 1),
            ("cpu, arc", [arc], 1),
            ("cpu, arc, and disk", [arc, TierConfig(disk=folder, size=disk)], 1),
            ("remote", [arc], 2),
        ):
            made = [
                OneModel(
                    model,
                    tiers,
                    name=f"n{i}",
                    most_tokens=longest,
                    num_blocks=device,
                    shares=name == "remote",
                )
                for i in range(nodes)
            ]
            served[name] = _serve(made, prompts)
            for each in made:
                each.engine.shutdown()
    return served


def _serve(nodes: list[OneModel], prompts: list[list[int]]) -> Served:
    nodes[0].serve([9, 9, 9])  # warm-up: what is created at first use must not count for a layout
    seconds = sorted(
        nodes[turn % len(nodes)].serve(prompt, nodes[1 - turn % 2] if len(nodes) == 2 else None)
        for turn, prompt in enumerate(prompts)
    )
    computed = sum(node.scheduler.stats().prompt_tokens_computed for node in nodes)
    found = {
        f"{tier.name} of {number}" if len(nodes) > 1 else tier.name: tier.found_tokens / tier.asked_tokens
        for number, node in enumerate(nodes)
        if node.engine.worker is not None
        for tier in node.engine.worker.stats().tiers
    }
    p99 = seconds[min(len(seconds) * 99 // 100, len(seconds) - 1)]
    return Served(median(seconds), p99, computed / sum(map(len, prompts)), found)


def _step(scheduler: Scheduler, worker: WorkerConnector | None) -> None:
    step = scheduler.schedule()
    if worker is not None and step.connector_metadata is not None:
        worker.bind_connector_metadata(step.connector_metadata)
        if step.preempted_req_ids:
            worker.handle_preemptions()
        worker.start_load_kv()
        worker.wait_for_save()
    requests, sampled = scheduler.requests, {}
    for request_id in step.num_scheduled_tokens:
        request = requests[request_id]
        if request.num_computed_tokens >= request.num_tokens:
            sampled[request_id] = [7]
    told = worker.get_finished(step.finished_req_ids) if worker is not None else None
    scheduler.update_from_output(step, ModelOutput(sampled), told)


def memcpy_seconds(size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(3 * REPEATS):
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(model: str) -> TierFigures:
    figures = TierFigures()
    # In turns, so that other work on the machine slows all of them.
    for _ in range(REPEATS):
        for name, policy in (("no tier", None), *((policy.value, policy) for policy in EvictionPolicy)):
            figures.step_us[name] = min(median_step(policy), figures.step_us.get(name, math.inf))
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
            figures.copy_s[name] = copy_seconds(one, tiers[0])
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
            f"{figures.compute_s / seconds:.0f} × faster",
        )
    for name, seconds in figures.copy_s.items():
        share = figures.memcpy_s / seconds
        table.add_row(f"their copies from {name}", f"{seconds * 1e3:.1f} ms", f"{share:.2f} of memcpy's rate")
    table.add_row(
        f"memcpy of the same {figures.loaded_bytes >> 20} MiB", f"{figures.memcpy_s * 1e3:.1f} ms", ""
    )
    for name, share in figures.found.items():
        table.add_row(f"of the trace's tokens not computed: {name}", f"{100 * share:.1f}%", "")
    for name, served in figures.served.items():
        table.add_row(
            f"served, {name}: first token",
            f"{served.p50_s * 1e3:.0f} ms p50, {served.p99_s * 1e3:.0f} ms p99",
            f"{100 * served.computed:.1f}% computed; found by "
            + (", ".join(f"{tier} {100 * share:.0f}%" for tier, share in served.found.items()) or "none"),
        )
    console.print(table)


def beside_vllm(environment: Path) -> tier_parity.Parity:
    """Runs in a process of its own, because Tandem is not installed in vLLM's environment."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = ["benchmarks.tier_parity", "--vllm", str(environment), "--runs", "20", "--json", file.name]
        subprocess.run([sys.executable, "-m", *command], check=True)
        return msgspec.json.decode(file.read(), type=tier_parity.Parity)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--served", type=int, default=0, help="so many of them by a real engine, too")
    parser.add_argument("--vllm", type=Path, help="an environment that has vLLM 0.32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = prepare_model(arguments.model, lambda what, share: None).path
    figures = measure(model)
    if arguments.trace:
        figures.found = replay(read_trace(arguments.trace, arguments.requests))
        if arguments.served:
            figures.served = serve_trace(model, read_trace(arguments.trace, arguments.served))
    if arguments.vllm:
        figures.managers = beside_vllm(arguments.vllm)
    console = Console()
    show(figures, console)
    show_floors(floors(figures), console)
    if arguments.json:
        write_json(figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
