"""How long agents' jobs take under `continuum`, compared with FCFS with and without a prefix cache. Runs Tandem's scheduler on a virtual clock.

    python -m benchmarks.agents [--seeds N] [--json FILE]

A job is a task of several turns. A turn is a prompt that begins with the whole turn before, an answer that calls a tool, and the tool's time,
from 0.1 to 30 s by the tool. At any time ten jobs more than fit into the KV cache are running, on one aggregated node whose steps take what
`COSTS` says. `again` is that trace; `never` has the same jobs with prompts that have nothing in common, for which pins are useless.

No figure depends on the machine. Figures are means over several traces of the same kind (`--seeds`), with the worst of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from statistics import fmean

import msgspec

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.base.errors import InternalError
from tandem.decode_node.node import DecodeRules
from tandem.engine.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from tandem.simulator.clock import VirtualLoop
from tandem.simulator.costs import CostModel, CostTable
from tandem.simulator.network import Network
from tandem.simulator.node import SimulatedNode
from tandem.simulator.outcome import AnswerLog, AnswerTimes
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import Submit, TokenBatch, TurnEnded
from tandem.wire.sampling import SamplingParams

BLOCK = 16
SHARED_TOKENS = 1024  # the system prompt and the tools, the same in every job
JOBS_THAT_FIT = 12
MORE = 10
JOBS = 80
# A tool, how often it is called, and how many seconds it takes.
TOOLS = (
    ("read", 0.35, 0.1, 0.4),
    ("search", 0.25, 0.2, 1.2),
    ("edit", 0.15, 0.1, 0.3),
    ("run", 0.15, 0.5, 6.0),
    ("test", 0.10, 5.0, 30.0),
)
# An 8B model on one GPU, in round numbers: 12,000 prompt tokens a second, fewer with long contexts; decode steps of 12 ms and more.
COSTS = CostModel(
    name="agents",
    max_model_len=32768,
    blocks=2,  # set from the jobs
    block_size=BLOCK,
    kv_bytes_per_token=131072.0,
    prefill=CostTable([1.0, 2048.0], [0.0, 32768.0], [[0.012, 0.014], [0.170, 0.420]]),
    decode=CostTable([1.0, 64.0], [0.0, 32768.0], [[0.012, 0.016], [0.018, 0.140]]),
)


class AgentTurn(msgspec.Struct, frozen=True):
    input_tokens: int  # that the turn adds: the task, or the tool's result
    answer_tokens: int
    tool: str
    tool_s: float


class AgentOutcome(msgspec.Struct, frozen=True):
    policy: str
    caching: bool
    repeats: bool
    mean_s: float
    p95_s: float
    total_s: float
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    preemptions: int
    pins_made: int
    pins_met: int
    pins_ended: dict[str, int]


def make_jobs(seed: int) -> list[list[AgentTurn]]:
    draw = random.Random(seed)
    jobs = []
    for _ in range(JOBS):
        turns = []
        for turn in range(draw.randint(6, 16)):
            ((tool, _, low, high),) = draw.choices(TOOLS, [share for _, share, _, _ in TOOLS])
            added = draw.randint(600, 2400) if turn == 0 else draw.randint(100, 900)
            turns.append(AgentTurn(added, draw.randint(40, 200), tool, draw.uniform(low, high)))
        jobs.append(turns)
    return jobs


def blocks_for(jobs: list[list[AgentTurn]]) -> int:
    """Returns the number of blocks that hold all jobs at the mean of their lengths."""
    means = []
    for turns in jobs:
        size, sizes = 0, []
        for turn in turns:
            size += turn.input_tokens + turn.answer_tokens
            sizes.append(size)
        means.append(fmean(sizes))
    return 1 + (SHARED_TOKENS + round(JOBS_THAT_FIT * fmean(means))) // BLOCK


class Play:
    def __init__(
        self, seed: int, policy: SchedulingPolicy, *, caching: bool = True, repeats: bool = True, by_steps: bool = False
    ) -> None:
        """`by_steps` is as for a simulated node."""
        self._by_steps = by_steps
        self._policy, self._caching, self._repeats = policy, caching, repeats
        self._jobs = make_jobs(seed)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._answers: dict[str, list[int]] = {}
        self._names = 0
        self._times: list[float] = []

    def run(self) -> AgentOutcome:
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(self._run())
        finally:
            loop.close()

    async def _run(self) -> AgentOutcome:
        self._loop = loop = asyncio.get_running_loop()
        blocks = blocks_for(self._jobs)
        costs = msgspec.structs.replace(COSTS, blocks=blocks)
        info = NodeInfo("a0", Role.AGGREGATED, 1, "sim://a0", "", "agents", costs.max_model_len, BLOCK)
        self._log = AnswerLog(None, 0.0)
        self._node = SimulatedNode(
            loop,
            info,
            DecodeRules(Role.AGGREGATED),
            costs,
            SchedulerConfig(policy=self._policy),
            CacheConfig(block_size=BLOCK, prefix_caching=self._caching),
            Network(loop, costs),
            self._log,
            self._on_tokens,
            by_steps=self._by_steps,
        )
        left = list(enumerate(self._jobs))[::-1]

        async def work(first: int) -> None:
            await asyncio.sleep(0.2 * first)
            while left:
                await self._job(*left.pop())

        async with asyncio.TaskGroup() as group:
            for first in range(JOBS_THAT_FIT + MORE):
                group.create_task(work(first))
        stats = self._node.scheduler.stats()
        self._node.scheduler.end_pins()
        self._node.scheduler.check_integrity()
        if (after := self._node.scheduler.stats()).free_blocks != after.total_blocks:
            raise InternalError("blocks have leaked")
        times = sorted(self._times)
        return AgentOutcome(
            self._policy.value, self._caching, self._repeats, fmean(times), times[int(0.95 * len(times))], loop.time(),
            stats.prompt_tokens_computed, stats.prompt_tokens_cached, stats.preemptions, stats.pins_made, stats.pins_met,
            dict(stats.pins_ended),
        )  # fmt: skip

    def _text(self, count: int) -> list[int]:
        """Returns tokens that no other text has."""
        self._names += 1
        return [self._names] * count

    async def _job(self, number: int, turns: list[AgentTurn]) -> None:
        began, history = self._loop.time(), [0] * SHARED_TOKENS
        for index, turn in enumerate(turns):
            history += self._text(turn.input_tokens)
            if not self._repeats:
                history = self._text(len(history))
            is_last = index == len(turns) - 1
            request_id = f"{number}-{index}"
            self._names += 1
            submit = Submit(request_id, "", prompt_token_ids=history, sampling=SamplingParams(temperature=0.0, max_tokens=turn.answer_tokens, ignore_eos=True, seed=self._names), timeout_s=1e6, job_id=f"job {number}", is_last_step=is_last)  # fmt: skip
            ended = self._waiting[request_id] = self._loop.create_future()
            self._answers[request_id] = []
            self._log.live[request_id] = AnswerTimes(self._loop.time(), len(history))
            self._node.deliver(submit)
            await ended
            del self._log.live[request_id]
            history = history + self._answers.pop(request_id)
            if not is_last:
                self._node.deliver(TurnEnded("", request_id, f"job {number}", [turn.tool]))
                await asyncio.sleep(turn.tool_s)
        self._times.append(self._loop.time() - began)

    def _on_tokens(self, batch: TokenBatch) -> None:
        for chunk in batch.chunks:
            if chunk.error is not None:
                raise InternalError(f"{chunk.request_id}: {chunk.error}")
            self._answers[chunk.request_id] += chunk.token_ids
            if chunk.finish is not None:
                self._waiting.pop(chunk.request_id).set_result(None)


def row_of(outcomes: list[AgentOutcome], trace: str) -> dict[str, object]:
    """Means of times, and sums of all else."""
    first, ended = outcomes[0], Counter[str]()
    for outcome in outcomes:
        ended.update(outcome.pins_ended)
    times = ("mean_s", "p95_s", "total_s")
    sums = ("prompt_tokens_computed", "preemptions", "pins_made", "pins_met")
    return {
        "prompts": trace,
        "policy": first.policy,
        "prefix cache": "yes" if first.caching else "no",
        **{field: fmean(getattr(outcome, field) for outcome in outcomes) for field in times},
        **{field: sum(getattr(outcome, field) for outcome in outcomes) for field in sums},
        "ended": ", ".join(f"{why} {count}" for why, count in ended.items()),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    fcfs, continuum = SchedulingPolicy.FCFS, SchedulingPolicy.CONTINUUM
    plays = (
        ("again", fcfs, False), ("again", fcfs, True), ("again", continuum, True), ("never", fcfs, True), ("never", continuum, True),
    )  # fmt: skip
    results = {
        (trace, policy, caching): [
            Play(seed, policy, caching=caching, repeats=trace == "again").run() for seed in range(options.seeds)
        ]
        for trace, policy, caching in plays
    }
    rows = [row_of(outcomes, trace) for (trace, _, _), outcomes in results.items()]
    said = []
    for trace in ("again", "never"):
        ratios = [
            ours.mean_s / theirs.mean_s - 1
            for ours, theirs in zip(results[trace, continuum, True], results[trace, fcfs, True], strict=True)
        ]
        against = f"against fcfs with a prefix cache, {max(ratios):+.1%} at worst"
        said.append(f"{trace}: mean job time {fmean(ratios):+.1%} {against}")
    title = f"{JOBS} jobs, {JOBS_THAT_FIT + MORE} at a time where {JOBS_THAT_FIT} fit"
    figures = [one for each in results.values() for one in each]
    return report(options, figures, table_of(title, rows), *said, width=170)


if __name__ == "__main__":
    run(main)
