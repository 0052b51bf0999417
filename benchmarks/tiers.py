"""What tiers of the KV cache cost and save.

    python -m benchmarks.tiers [--model FOLDER] [--trace FILE [--requests N]] [--json FILE]

*Steps*: the scheduler alone with 256 requests that decode, without a tier and with a tier whose copies cost nothing. *Load*: a prompt of 2,048
tokens that the device no longer has, from host memory and from a disk whose files are in the page cache, compared with computing it and with
memcpy of the same bytes. All figures of one run are of one machine: compare within a run.

*Replay*, with a trace in Mooncake's format: the trace's first requests go through the real scheduler, with a model that answers at once and copies
that cost nothing; shows how much of their prompts each layout found. A block of the trace is one of Tandem's. The device has room for a tenth of
the distinct blocks, the tier in host memory for three tenths, the one on disk for all.

Each figure that has a floor is compared with it at the end.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from benchmarks.lib.engines import greedy, request_of
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import Floor, at_least, at_most, table_of
from benchmarks.scheduler import BLOCK_SIZE, CONTEXT, NUM_BLOCKS, TOKEN_BUDGET, add_all, answer_to, random_prompts
from tandem.cluster.models.store import prepare_model
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory, WorkerConnector
from tandem.kvtransfer.config import EvictionPolicy, TierConfig, TransferConfig
from tandem.kvtransfer.multi import MultiScheduler, MultiWorker, create_connector
from tandem.kvtransfer.offload.manager import SlotManager, TierManager
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.spec import Copy, Mover, Tier, create_tier
from tandem.kvtransfer.offload.worker_half import TierWorker
from tandem.loadgen.traces import TraceRow, read_trace
from tandem.wire.nodes import new_epoch

GROUPS = [KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, (0,))]
RUNNING = 256
PROMPT, ANSWER = 512, 128
TIER_SLOTS = 6000
REPEATS = 3
PATIENCE_S = 120.0
LOADED_TOKENS = 2048


class TierFigures(msgspec.Struct):
    step_us: dict[str, float] = {}  # medians
    compute_s: float = 0.0  # the time to the prompt's first token without a tier
    load_s: dict[str, float] = {}  # the time to the prompt's first token from each tier
    copy_s: dict[str, float] = {}  # the copies alone
    memcpy_s: float = 0.0  # memcpy of the same bytes
    loaded_bytes: int = 0
    found: dict[str, float] = {}  # in the replayed trace: the share of prompt tokens that were not computed


class FreeMover(Mover):
    """Copies nothing, and reports it done at once."""

    stored_bytes = 0
    loaded_bytes = 0

    def __init__(self) -> None:
        self._jobs: list[int] = []

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        self._jobs += [copy.job for copy in (*stores, *loads)]

    def take_ended(self) -> dict[int, bool | None]:
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


def with_free_tiers(
    tiers: list[tuple[int, EvictionPolicy]], running: int, num_blocks: int, longest: int
) -> tuple[Scheduler, WorkerConnector | None]:
    """Returns a scheduler, and the worker half of its connector if there are tiers: each has so many slots."""
    context = ConnectorContext("n", 1, "127.0.0.1", BLOCK_SIZE, TransferConfig(), lambda: None)
    made = [Tier(FreeTier(policy, slots), 1) for slots, policy in tiers]
    planners, workers = ([TierScheduler(GROUPS, tier) for tier in made], [TierWorker(context, tier) for tier in made])
    # A lone tier is used as a node without peers uses it.
    planner = planners[0] if len(made) == 1 else MultiScheduler(planners, longest=True)
    worker = workers[0] if len(made) == 1 else MultiWorker(workers)
    if made:
        worker.register_kv_caches(KVCacheMemory(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 1), "m", 1, 1, 9))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=TOKEN_BUDGET),
        CacheConfig(block_size=BLOCK_SIZE),
        GROUPS,
        num_blocks,
        longest,
        connector=planner if made else None,
    )
    return scheduler, worker if made else None


def median_step(policy: EvictionPolicy | None) -> float:
    """Returns the microseconds of planning, the connector's two halves, and booking."""
    tiers = [] if policy is None else [(TIER_SLOTS, policy)]
    scheduler, worker = with_free_tiers(tiers, RUNNING, NUM_BLOCKS, CONTEXT)
    add_all(scheduler, random_prompts(RUNNING, PROMPT), ANSWER)
    seconds = []
    while scheduler.has_unfinished_requests():
        started = time.perf_counter()
        _step(scheduler, worker)
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
                "n", new_epoch(), "127.0.0.1", BLOCK_SIZE, TransferConfig(), self._woken.set,
                has_peers=False, tiers=tiers, groups=info.groups,
            )  # fmt: skip
            planner, worker = create_connector(context)
        self.scheduler = Scheduler(config, cache, info.groups, info.num_blocks, info.max_model_len, connector=planner)
        self.engine = Engine(self.scheduler, self.runner, worker)
        self._count = 0

    def first_token(self, prompt: list[int]) -> float:
        """Returns the seconds to the first token. Afterwards no block is held and the device's cache is empty."""
        self._count += 1
        started = time.perf_counter()
        self.engine.add_request(request_of(f"r{self._count}", prompt, greedy(1)))
        while not self._step():
            pass
        seconds = time.perf_counter() - started
        while self.scheduler.stats().free_blocks < self.scheduler.stats().total_blocks:
            self._step()
        self.scheduler.state.cache.reset_prefix_cache()
        return seconds

    def _step(self) -> bool:
        """Returns whether there was something to report."""
        self._woken.clear()
        result = self.engine.step()
        if not result.progressed and not self.scheduler.has_work():
            self._woken.wait(PATIENCE_S)
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
        [block * BLOCK_SIZE + i for block in row.blocks for i in range(BLOCK_SIZE)] for row in rows if row.blocks
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
    scheduler, worker = with_free_tiers(tiers, 8, num_blocks, 1 << 20)
    waiting = list(enumerate(prompts))[::-1]
    while waiting or scheduler.has_unfinished_requests():
        while waiting and len(scheduler.requests) < 2:
            number, prompt = waiting.pop()
            scheduler.add_request(request_of(str(number), prompt, greedy(1)))
        _step(scheduler, worker)
    return 1 - scheduler.stats().prompt_tokens_computed / sum(map(len, prompts))


def _step(scheduler: Scheduler, worker: WorkerConnector | None) -> None:
    step = scheduler.schedule()
    if worker is not None and step.connector_metadata is not None:
        worker.bind_connector_metadata(step.connector_metadata)
        if step.preempted_req_ids:
            worker.handle_preemptions()
        worker.start_load_kv()
        worker.wait_for_save()
    told = worker.get_finished(step.finished_req_ids) if worker is not None else None
    scheduler.update_from_output(step, answer_to(step, scheduler), told)


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


def rows_of(figures: TierFigures) -> list[dict[str, str]]:
    rows: list[tuple[str, ...]] = []
    alone = figures.step_us["no tier"]
    for name, step in figures.step_us.items():
        rows.append((f"a step at {RUNNING} running, {name}", f"{step:.0f} µs", f"{step / alone:.2f} ×"))
    rows.append((f"{LOADED_TOKENS} tokens computed", f"{figures.compute_s * 1e3:.0f} ms"))
    for name, seconds in figures.load_s.items():
        faster = f"{figures.compute_s / seconds:.0f} × faster"
        rows.append((f"{LOADED_TOKENS} tokens from {name}", f"{seconds * 1e3:.1f} ms", faster))
    for name, seconds in figures.copy_s.items():
        rate = f"{figures.memcpy_s / seconds:.2f} of memcpy's rate"
        rows.append((f"their copies from {name}", f"{seconds * 1e3:.1f} ms", rate))
    size = figures.loaded_bytes >> 20
    rows.append((f"memcpy of the same {size} MiB", f"{figures.memcpy_s * 1e3:.1f} ms"))
    for name, share in figures.found.items():
        rows.append((f"of the trace's tokens not computed: {name}", f"{100 * share:.1f}%"))
    return [dict(zip(("what", "figure", "beside"), row, strict=False)) for row in rows]


def floors_of(figures: TierFigures) -> list[Floor]:
    step = max(each for name, each in figures.step_us.items() if name != "no tier")
    prefix = f"{LOADED_TOKENS} tokens from host memory"
    share = None
    if figures.found:
        share = figures.found["cpu, arc, and disk"] / figures.found["a device with room for all"]
    return [
        at_most("a step with a tier", step / figures.step_us["no tier"], 1.05, "×"),
        at_least(f"{prefix}, of memcpy's rate", figures.memcpy_s / figures.copy_s["cpu"], 0.8),
        at_least(f"{prefix}, faster than computing them", figures.compute_s / figures.load_s["cpu"], 10, "×"),
        at_least("host memory and disk, of an infinite cache's hits (--trace)", share, 0.95),
    ]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    model = prepare_model(options.model, lambda what, share: None).path
    figures = measure(model)
    if options.trace:
        figures.found = replay(read_trace(options.trace, options.requests))
    columns = {"": "{what}", " ": "{figure}", "beside": "{beside}"}
    table = table_of("Tiers of the cache", rows_of(figures), columns, left=3)
    return report(options, figures, table, floors=floors_of(figures))


if __name__ == "__main__":
    run(main)
