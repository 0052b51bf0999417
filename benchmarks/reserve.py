"""What `scheduler.reserve` costs and saves, in random runs under memory pressure on a virtual clock.

    python -m benchmarks.reserve [--runs N] [--json FILE]

Every run is a random pool that is too small for its random requests, which arrive over time. The same runs are repeated with `none`, `prompt` and
`sequence`. A step takes a fixed time and more per token, as on a machine that computes prompts at `TOKENS_PER_S`. No figure depends on the
machine that runs this.
"""

from __future__ import annotations

import random
from statistics import mean

import msgspec

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from benchmarks.scheduler import answer_to
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, Reserve, SchedulerConfig
from tandem.engine.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

BLOCK_SIZE = 16
STEP_S = 0.010
TOKENS_PER_S = 2000.0
REQUESTS = 60


class ReserveOutcome(msgspec.Struct, frozen=True):
    """Sums over all runs, unless a field says otherwise."""

    reserve: str
    preemptions: int
    computed_twice: float  # the share of tokens that were computed more than once
    seconds: float  # until the last answer
    first_token_mean_s: float
    first_token_p90_s: float
    longest_gap_mean_s: float  # the mean over runs of the longest time between two tokens of one answer


class ReplayResult(msgspec.Struct):
    preemptions: int
    computed: int
    needed: int
    seconds: float
    first_tokens: list[float]
    gaps: list[float]


def play(number: int, reserve: Reserve) -> ReplayResult:
    draw = random.Random(number)
    blocks = draw.choice([64, 128, 256])
    longest = blocks * BLOCK_SIZE // draw.choice([2, 3, 6])
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=draw.choice([16, 64]),
            max_num_batched_tokens=draw.choice([128, 512, 2048]),
            step_target_ms=0,
            reserve=reserve,
        ),
        CacheConfig(block_size=BLOCK_SIZE, prefix_caching=draw.random() < 0.5, hash_seed="benchmark"),
        [KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, (0,))],
        blocks,
        max_model_len=1 << 20,
    )
    at, arrivals = 0.0, []
    pace = draw.choice([0.05, 0.2, 0.5])
    for index in range(REQUESTS):
        at += draw.expovariate(1 / pace)
        prompt = [draw.randrange(50_000) for _ in range(draw.randint(8, longest))]
        answer = draw.randint(4, longest)
        arrivals.append((at, f"r{index}", prompt, answer))
    needed = sum(len(prompt) + answer - 1 for _, _, prompt, answer in arrivals)
    return _run(scheduler, arrivals, needed)


def _run(scheduler: Scheduler, arrivals: list[tuple[float, str, list[int], int]], needed: int) -> ReplayResult:
    now, computed = 0.0, 0
    came: dict[str, float] = {}
    last: dict[str, float] = {}
    first_tokens: list[float] = []
    gaps: dict[str, float] = {}
    waiting = list(reversed(arrivals))
    while waiting or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            at, name, prompt, answer = waiting.pop()
            came[name] = at
            sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
            scheduler.add_request(
                Request(name, RequestFacts(prompt_token_ids=prompt, sampling=sampling), arrival_time=at)
            )
        step = scheduler.schedule()
        computed += step.total_num_scheduled_tokens
        now += STEP_S + step.total_num_scheduled_tokens / TOKENS_PER_S
        output = answer_to(step, scheduler)
        scheduler.update_from_output(step, output)
        for name in output.sampled_token_ids:
            if name in last:
                gaps[name] = max(gaps.get(name, 0.0), now - last[name])
            else:
                first_tokens.append(now - came[name])
            last[name] = now
    return ReplayResult(scheduler.stats().preemptions, computed, needed, now, first_tokens, list(gaps.values()))


def measure(runs: int) -> list[ReserveOutcome]:
    outcomes = []
    for reserve in Reserve:
        played = [play(number, reserve) for number in range(runs)]
        first_tokens = sorted(value for run in played for value in run.first_tokens)
        computed, needed = (sum(getattr(run, name) for run in played) for name in ("computed", "needed"))
        outcomes.append(
            ReserveOutcome(
                reserve.value,
                sum(run.preemptions for run in played),
                max(0.0, computed / needed - 1),
                sum(run.seconds for run in played),
                mean(first_tokens),
                first_tokens[len(first_tokens) * 9 // 10],
                mean(value for run in played for value in run.gaps),
            )
        )
    return outcomes


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args()
    outcomes = measure(options.runs)
    title = f"{options.runs} random runs of {REQUESTS} requests"
    return report(options, outcomes, table_of(title, outcomes), width=140)


if __name__ == "__main__":
    run(main)
