"""The scheduler alone, with a model that answers at once: microseconds per step, per token and per added request.

    python -m benchmarks.scheduler [--quick] [--json FILE]
    python -m benchmarks.scheduler --vllm-python PATH --model FOLDER --peer-script PATH

With the last three flags, vLLM's own scheduler does the same work in the same run: PATH is the Python of an environment with vLLM, FOLDER is a
local model whose configuration it reads, and the script drives it and prints one line per workload,
`nreq=.. plen=.. olen=.. seqs=.. shared=..: add .. us/req, .. steps, median step .. us, total ..s, .. us/token`.

A workload is a number of random prompts that arrive at once and are answered to the end. All prompts begin with the same `shared` tokens. A step
is `schedule` and `update_from_output`, and making the model's answer between them, which the peer's figures include.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import msgspec

from benchmarks.lib.engines import greedy, random_prompts, request_of
from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.processes import output_of
from benchmarks.lib.tables import at_least, seen, table_of
from tandem.base.errors import TandemError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.hashing import make_block_hasher
from tandem.engine.config import CacheConfig, HashAlgorithm, SchedulerConfig
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
VOCABULARY = 49_000
CONTEXT = 8192
TOKEN_BUDGET = 8192
NUM_BLOCKS = 20_000
STEP_FLOOR = 3.0  # times faster than vLLM with 256 running requests
ADD_FLOOR = 2.0
PEER_WITHIN_S = 900.0
PEER_LINE = re.compile(
    r"nreq=(\d+) plen=(\d+) olen=(\d+) seqs=(\d+) shared=(\d+): "
    r"add ([\d.]+) us/req, \d+ steps, median step ([\d.]+) us, .*?, ([\d.]+) us/token"
)


class SchedulerWorkload(msgspec.Struct, frozen=True):
    requests: int
    prompt: int
    answer: int
    running: int
    shared: int = 0
    drafts: int = 0

    def __str__(self) -> str:
        shared = f", {self.shared} shared" if self.shared else ""
        shared += f", {self.drafts} drafts" if self.drafts else ""
        return f"{self.requests} × {self.prompt}+{self.answer}{shared}, {self.running} running"


# The first three are also the peer's.
WORKLOADS = (
    SchedulerWorkload(256, 512, 128, 256),
    SchedulerWorkload(64, 512, 128, 64),
    SchedulerWorkload(1024, 1024, 64, 256, shared=512),
    SchedulerWorkload(64, 512, 128, 64, shared=448),
    SchedulerWorkload(256, 512, 128, 256, shared=448),
    SchedulerWorkload(1024, 128, 128, 1024),
    SchedulerWorkload(1024, 512, 64, 1024, shared=448),
    SchedulerWorkload(32, 512, 128, 32, drafts=3),
    SchedulerWorkload(256, 512, 128, 256, drafts=3),
)


class Speed(msgspec.Struct, frozen=True):
    """Values in microseconds."""

    add_request: float
    step: float  # median
    token: float
    schedule: float | None = None  # medians, without making the model's answer
    update: float | None = None


def make_scheduler(running: int, num_blocks: int = NUM_BLOCKS, drafts: int = 0) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=TOKEN_BUDGET,
            num_speculative_tokens=drafts,
            max_draft_loss=1.0,  # as many as may be
        ),
        CacheConfig(block_size=BLOCK_SIZE),
        [KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, (0,))],
        num_blocks,
        CONTEXT,
        frozenset({2}),
    )


def add_all(scheduler: Scheduler, prompts: list[list[int]], answer: int) -> float:
    """Returns the seconds to create, hash and add the requests."""
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        scheduler.add_request(request_of(str(i), prompt, greedy(answer), hasher=scheduler.block_hasher))
    return time.perf_counter() - started


def answer_to(step: SchedulerOutput, scheduler: Scheduler) -> ModelOutput:
    """Returns what a model answers at once: a token for each request whose tokens this step computes to the end. Of its drafts the first is
    right, and the next are made."""
    requests, sampled = scheduler.requests, {}
    for request_id in step.num_scheduled_tokens:
        request = requests[request_id]
        if request.num_computed_tokens >= request.num_tokens:
            sampled[request_id] = [7, 7] if request_id in step.spec_token_ids else [7]
    limits = step.draft_limits or {}
    return ModelOutput(sampled, draft_token_ids={name: [7] * most for name, most in limits.items()})


def steps(scheduler: Scheduler) -> Iterator[tuple[float, float, float, int]]:
    """Yields for each step the seconds in all, for planning and for booking, and the number of tokens that it produced."""
    while scheduler.has_unfinished_requests():
        started = time.perf_counter()
        step = scheduler.schedule()
        planned = time.perf_counter()
        output = answer_to(step, scheduler)
        answered = time.perf_counter()
        scheduler.update_from_output(step, output)
        ended = time.perf_counter()
        yield ended - started, planned - started, ended - answered, len(output.sampled_token_ids)


def measure(work: SchedulerWorkload) -> Speed:
    num_blocks = max(NUM_BLOCKS, work.running * (work.prompt + work.answer) // 8)
    scheduler = make_scheduler(work.running, num_blocks, work.drafts)
    prompts = random_prompts(work.requests, work.prompt, VOCABULARY, shared=work.shared)
    adding = add_all(scheduler, prompts, work.answer)
    whole, planning, booking, tokens = zip(*steps(scheduler), strict=True)
    return Speed(
        add_request=adding * 1e6 / work.requests,
        step=median(whole) * 1e6,
        token=sum(whole) * 1e6 / sum(tokens),
        schedule=median(planning) * 1e6,
        update=median(booking) * 1e6,
    )


def best(measurements: list[Speed]) -> Speed:
    """The smallest value of each figure, because other load on the machine only adds time."""
    return Speed(**{name: min(getattr(one, name) for one in measurements) for name in Speed.__struct_fields__})


def measure_decoding(scheduler: Scheduler, count: int) -> float:
    """Returns the median duration in microseconds of `count` steps in which every running request gets one token."""
    running = scheduler.stats().running
    timed = [whole for whole, _, _, tokens in itertools.islice(steps(scheduler), count) if tokens == running]
    return median(timed) * 1e6


def prefilled(running: int, waiting: int = 0, num_blocks: int = NUM_BLOCKS) -> Scheduler:
    """Returns a scheduler with `running` requests that decode, with lengths that do not cross block boundaries together, and `waiting` others."""
    scheduler = make_scheduler(running, num_blocks)
    draw = random.Random(1)
    prompts = [prompt[: draw.randrange(64, 192)] for prompt in random_prompts(running, 192, VOCABULARY)]
    add_all(scheduler, prompts, CONTEXT - 200)
    while scheduler.stats().waiting_tokens:
        next(steps(scheduler))
    for i in range(waiting):
        scheduler.add_request(request_of(f"waits {i}", [i % VOCABULARY] * 8, greedy(1)))
    return scheduler


def measure_pools(sizes: tuple[int, ...], rounds: int, count: int) -> dict[int, dict[str, float]]:
    found = {size: {"build_ms": float("inf"), "step_us": float("inf")} for size in sizes}
    for _ in range(rounds):
        for size, figures in found.items():
            started = time.perf_counter()
            make_scheduler(256, size)
            built = time.perf_counter() - started
            figures["build_ms"] = min(figures["build_ms"], built * 1e3)
            step = measure_decoding(prefilled(256, num_blocks=size), count)
            figures["step_us"] = min(figures["step_us"], step)
    return found


def measure_lines(lengths: tuple[int, ...], rounds: int, count: int) -> dict[int, float]:
    found = dict.fromkeys(lengths, float("inf"))
    for _ in range(rounds):
        for length in lengths:
            found[length] = min(found[length], measure_decoding(prefilled(256, waiting=length), count))
    return found


def measure_hashing(repeats: int) -> dict[str, float]:
    """Returns the microseconds for a prompt of 512 tokens."""
    prompts = random_prompts(repeats, 512, VOCABULARY)
    found = {}
    for algorithm in HashAlgorithm:
        hasher = make_block_hasher(algorithm, BLOCK_SIZE, "seed")
        timed = []
        for request in [request_of("a", prompt, greedy(1)) for prompt in prompts]:
            started = time.perf_counter()
            hasher.extend([], request)
            timed.append(time.perf_counter() - started)
        found[algorithm.value] = median(timed) * 1e6
    return found


def measure_peer(python: str, model: str, script: str) -> dict[SchedulerWorkload, Speed]:
    try:
        printed = output_of([python, script, model], PEER_WITHIN_S)
    except TandemError as error:
        say(f"vLLM is not in this run: {error}")
        return {}
    found = {}
    for match in PEER_LINE.finditer(printed):
        requests, prompt, answer, running, shared = map(int, match.groups()[:5])
        add, step, token = map(float, match.groups()[5:])
        found[SchedulerWorkload(requests, prompt, answer, running, shared)] = Speed(add, step, token)
    if not found:
        say(f"vLLM is not in this run: {script} printed no result")
    return found


def workload_row(work: SchedulerWorkload, speed: Speed, other: Speed | None) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(work),
        "workload": str(work),
        "tandem_us": msgspec.structs.asdict(speed),
        "vllm_us": msgspec.structs.asdict(other) if other else None,
        "times_faster": {"step": other.step / speed.step, "add": other.add_request / speed.add_request}
        if other
        else None,
    }


WORKLOAD_COLUMNS = {
    "workload": "{workload}",
    "step": "{tandem_us[step]:,.0f}",
    "schedule": "{tandem_us[schedule]:,.0f}",
    "update": "{tandem_us[update]:,.0f}",
    "per token": "{tandem_us[token]:,.1f}",
    "add a request": "{tandem_us[add_request]:,.1f}",
    "vLLM step": "{vllm_us[step]:,.0f}",
    "×": "{times_faster[step]:.1f}",
    "vLLM add": "{vllm_us[add_request]:,.0f}",
    "× ": "{times_faster[add]:.1f}",
}


GROWTH_COLUMNS = {"": "{what}", "µs per step": "{step:,.0f}", "to make": "{made}"}


def growth_rows(
    pools: dict[int, dict[str, float]], lines: dict[int, float], hashing: dict[str, float]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"what": f"a pool of {size:,} blocks", "step": found["step_us"], "made": f"{found['build_ms']:.0f} ms"}
        for size, found in pools.items()
    ]
    rows += [{"what": f"{length:,} requests in line", "step": step} for length, step in lines.items()]
    rows += [{"what": f"hashing 512 tokens, {name}", "made": f"{cost:.0f} µs"} for name, cost in hashing.items()]
    return rows


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM")
    parser.add_argument("--model", help="a local model folder, for vLLM's configuration")
    parser.add_argument("--peer-script", help="drives vLLM's scheduler")
    options = parser.parse_args()
    rounds, count = (1, 60) if options.quick else (3, 200)
    measured: dict[SchedulerWorkload, list[Speed]] = {work: [] for work in WORKLOADS}
    for i in range(rounds):
        for work in WORKLOADS:
            say(f"round {i + 1} of {rounds}: {work}")
            measured[work].append(measure(work))
    peer: dict[SchedulerWorkload, Speed] = {}
    if options.vllm_python and options.model and options.peer_script:
        say("vLLM's scheduler")
        peer = measure_peer(options.vllm_python, options.model, options.peer_script)
    else:
        say("vLLM is not in this run: give --vllm-python, --model and --peer-script")
    rows = [workload_row(work, best(speeds), peer.get(work)) for work, speeds in measured.items()]
    say("pools, lines, hashes")
    pools = measure_pools((10_000, 100_000, 1_000_000), rounds, count)
    lines = measure_lines((100, 1_000, 10_000, 100_000), rounds, count)
    hashing = measure_hashing(count)
    growth = growth_rows(pools, lines, hashing)
    ours, times = rows[0]["tandem_us"], rows[0]["times_faster"] or {}
    return report(
        options,
        {"workloads": rows, "pools": pools, "lines_us": lines, "hashing_us": hashing},
        table_of("microseconds; × is how many times faster than vLLM", rows, WORKLOAD_COLUMNS),
        table_of("what a step at 256 running requests must not depend on", growth, GROWTH_COLUMNS),
        floors=[
            seen("a step at 256 running requests", ours["step"], "µs"),
            seen("adding a request", ours["add_request"], "µs"),
            at_least("a step, beside vLLM's", times.get("step"), STEP_FLOOR, "×"),
            at_least("adding a request, beside vLLM's", times.get("add"), ADD_FLOOR, "×"),
        ],
        width=150,
    )


if __name__ == "__main__":
    run(main)
