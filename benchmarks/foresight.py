"""What foresight is worth: for changes of a cluster's sizes, in simulation, and for quotes.

    python -m benchmarks.foresight changes [--changes N] [--json FILE]
    python -m benchmarks.foresight quotes --trace FILE [--speed X ...] [--requests N] [--nodes N] [--json FILE]
    python -m benchmarks.foresight asked --url URL [--requests N] [--rate R] [--json FILE]

`changes`: a cluster whose costs are hidden serves a minute of requests; what a change of its prefill nodes brings is said with costs that are up to
15% off, and graded as a serving cluster grades it, by other requests like these on the changed cluster: how often the interval has the outcome.

`quotes`: every request of a trace is told, at each of four confidences, by when its first token comes, as `X-Tandem-Quote` does; how many are kept.
The nodes are alike, half of them prefill nodes; costs are written by hand, near those of a model of 8 billion weights on a GPU. Each load is played
three times: on steady nodes; on nodes that read prompts in 1.6 times the time during the middle third of the traffic; and on nodes that take 3%
longer forty times, which is three times as long at the end.

`asked`: the same of a serving cluster, as its clients see it. Prompts of 20 to 200 tokens come at random times, and ask for a quote at one of the
four confidences in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.pools.foresight.grading import grade, score_of
from tandem.loadgen.traces import read_trace
from tandem.router.dispatch import Dispatcher, Generation
from tandem.router.dispatch.ledger import RequestTimings
from tandem.router.quotes.wing import QuoteMaker
from tandem.simulator.change import change_of
from tandem.simulator.costs import CostModel, CostTable, RequestCost, StepBound, TransferCost
from tandem.simulator.node import SimulatedNode
from tandem.simulator.pools import SimulatedPools
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import simulate
from tandem.simulator.traffic import RecordedTraffic
from tandem.wire.forecasts import Forecast, MeasuredRequest
from tandem.wire.nodes import Role
from tests.simulator.test_change import rows, slower
from tests.simulator.test_what_if import measured, state
from tests.simulator.worlds import a_setup, node_costs

BLOCK, BUDGET = 512, 8192
CONTEXTS = (0.0, 131072.0)
READS, WRITES = (1.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0), (1.0, 256.0)
COSTS = CostModel(
    name="8 billion weights, by hand",
    max_model_len=131072,
    blocks=782,
    block_size=BLOCK,
    kv_bytes_per_token=131072.0,
    prefill=CostTable(
        list(READS),
        list(CONTEXTS),
        [[0.008 + max(n - 128, 0) * 4e-5 + n * (before + n / 2) * 2.2e-9 for before in CONTEXTS] for n in READS],
    ),
    decode=CostTable(
        list(WRITES), list(CONTEXTS), [[0.008 + n * (4e-5 + before * 4.5e-8) for before in CONTEXTS] for n in WRITES]
    ),
    transfer=TransferCost(0.004, 2e10),
    request=RequestCost(0.002, 1e-7, 0.001),
)


def _slow(node: SimulatedNode, times: float) -> None:
    node._costs = slower(node._costs, times)
    node._bound = StepBound(node._costs, BUDGET)


def with_large_blocks(config: TandemConfig) -> TandemConfig:
    return msgspec.structs.replace(
        config,
        cache=msgspec.structs.replace(config.cache, block_size=BLOCK),
        scheduler=msgspec.structs.replace(config.scheduler, max_num_batched_tokens=BUDGET),
    )


def said(seed: int, wanted: int, *, off: float, rate: float) -> tuple[Forecast, list[MeasuredRequest]]:
    """Returns what is said of `wanted` prefill nodes with costs that are off by this factor; and what other requests like these take in a
    cluster that has them."""
    hidden = node_costs()
    here = a_setup(rows(seed, rate), costs=hidden)
    page = state(measured(here), "prefill", "decode")
    forecast = change_of(page, {Role.PREFILL: wanted}, here.config, dict.fromkeys(Role, slower(hidden, off)))
    there = a_setup(rows(seed + 1000, rate), prefill=wanted, costs=hidden)
    return forecast, [
        MeasuredRequest(one.request_id, -one.ended_at, one.total_s, one.first_token_s, one.token_s)
        for one in measured(there)
    ]


def changes(options: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(5)
    graded = []
    for seed in range(options.changes):
        off, rate, wanted = rng.uniform(0.85, 1.15), rng.uniform(4, 8.5), rng.choice([2, 3])
        forecast, came = said(seed, wanted, off=off, rate=rate)
        graded.append(grade(forecast, came))
    score = score_of(graded)
    return [
        {"figure": one.what, "changes": score.graded, "inside": one.inside, "median error": round(one.error, 3)}
        for one in score.figures
    ]


CONFIDENCES = (0.5, 0.8, 0.9, 0.95)
SLOWER = 1.6
IN_A_ROW = 250


class QuotedDispatcher(Dispatcher):
    """Quotes each request at every confidence. `latest` has what it told in the last simulation."""

    latest: list[tuple[RequestTimings, list[float | None]]]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._told: list[tuple[RequestTimings, list[float | None]]] = []
        QuotedDispatcher.latest = self._told
        self._maker = QuoteMaker(self)

    async def generate(self, *args: Any, **more: Any) -> Generation:
        generation = await super().generate(*args, **more)
        life = generation.lives[0]
        self._told.append((life.timings, [self._maker.quote(life, each).by_s for each in CONFIDENCES]))
        return generation


# How many times as long prompts take from that share of the traffic's time on.
NODES: dict[str, list[tuple[float, float]]] = {
    "steady": [],
    "slower for a third": [(1 / 3, SLOWER), (2 / 3, 1 / SLOWER)],
    "slower and slower": [(step / 40, 1.03) for step in range(40)],
}


class SlowedPools(SimulatedPools):
    def __init__(self, *args: Any, seconds: float, changes: list[tuple[float, float]], **more: Any) -> None:
        super().__init__(*args, **more)
        for node in self.nodes:
            if node.info.role is Role.PREFILL:
                for share, times in changes:
                    self._loop.call_at(share * seconds, _slow, node, times)


def quotes(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, found = read_trace(options.trace, options.requests), []
    pool = PoolConfig(nodes=options.nodes // 2)
    config = with_large_blocks(TandemConfig(pools=PoolsConfig(prefill=pool, decode=pool)))
    for speed in options.speed:
        traffic = RecordedTraffic(speed).of(rows, 0)
        for nodes, changes in NODES.items():
            make = partial(SlowedPools, seconds=traffic.seconds, changes=changes)

            with (
                mock.patch("tandem.simulator.simulation.Dispatcher", QuotedDispatcher),
                mock.patch("tandem.simulator.simulation.SimulatedPools", make),
            ):
                told = simulate(SimulationSetup(config, dict.fromkeys(Role, COSTS), traffic))
            first = told.ttft_ms
            load = {"speed": speed, "nodes": nodes, "first token p50, ms": round(first.p50), "p90": round(first.p90)}  # type: ignore[union-attr]
            found.append(load | _graded(QuotedDispatcher.latest))
    return found


def _graded(told: list[tuple[RequestTimings, list[float | None]]]) -> dict[str, Any]:
    """A request that failed before its first token is one whose quote was not kept."""
    figures: dict[str, Any] = {"quoted": sum(by_s[-1] is not None for _, by_s in told)}
    for at, confidence in enumerate(CONFIDENCES):
        pairs = [(_took_s(timings), by) for timings, by_s in told if (by := by_s[at]) is not None]
        kept = [took <= by for took, by in pairs]
        figures[f"kept, {confidence:.0%}"] = round(sum(kept) / len(kept), 3)
        if confidence == 0.9:
            rows = [sum(kept[begin : begin + IN_A_ROW]) for begin in range(0, len(kept) - IN_A_ROW + 1, IN_A_ROW)]
            figures[f"least of {IN_A_ROW}, 90%"] = round(min(rows) / IN_A_ROW, 2)
            figures["quote ÷ first token, 90%, p50"] = round(statistics.median(by / took for took, by in pairs), 2)
    return figures


def _took_s(timings: RequestTimings) -> float:
    return math.inf if timings.first_token_at is None else timings.first_token_at - timings.arrived_at


class AskedQuote(msgspec.Struct):
    confidence: float
    by_s: float | None  # None: the server knew too little
    told_s: float  # when the client had the quote
    first_s: float  # when it had the first token


async def _ask(client: httpx.AsyncClient, model: str, confidence: float, prompt: list[int]) -> AskedQuote | None:
    """Returns None when the request was refused, which is no quote."""
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True}
    began = time.monotonic()
    async with client.stream(
        "POST", "/v1/completions", json=body, headers={"x-tandem-quote": f"{confidence}"}
    ) as answer:
        told_s = time.monotonic() - began
        if answer.status_code == 503:
            return None
        answer.raise_for_status()
        by = answer.headers["x-tandem-quote"].partition("first-token-by=")[2].partition(";")[0]
        lines = answer.aiter_lines()
        await anext(lines)
        quote = AskedQuote(confidence, float(by) if by else None, told_s, time.monotonic() - began)
        async for _ in lines:
            pass
    return quote


async def _ask_all(options: argparse.Namespace) -> list[AskedQuote | None]:
    rng = random.Random(11)
    async with (
        httpx.AsyncClient(base_url=options.url, timeout=600, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        tasks = []
        for index in range(options.requests):
            prompt = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(20, 200))]
            tasks.append(group.create_task(_ask(client, model, CONFIDENCES[index % len(CONFIDENCES)], prompt)))
            await asyncio.sleep(rng.expovariate(options.rate))
    return [task.result() for task in tasks]


def asked(options: argparse.Namespace) -> list[dict[str, Any]]:
    every = [each for each in asyncio.run(_ask_all(options)) if each is not None]
    found: list[dict[str, Any]] = []
    for confidence in CONFIDENCES:
        told = [(each, each.by_s) for each in every if each.confidence == confidence and each.by_s is not None]
        found.append(
            {
                "confidence": confidence,
                "quoted": len(told),
                "kept": round(sum(each.first_s <= by_s for each, by_s in told) / len(told), 3),
                "first token p50, ms": round(statistics.median(each.first_s for each, _ in told) * 1e3),
                "quote ÷ first token, p50": round(statistics.median(by_s / each.first_s for each, by_s in told), 2),
                "told after, ms, p50": round(statistics.median(each.told_s for each, _ in told) * 1e3),
            }
        )
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["changes", "quotes", "asked"])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, nargs="+", default=[1.2, 1.6, 2.0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=16)
    options = parser.parse_args()
    found = {"changes": changes, "quotes": quotes, "asked": asked}[options.what](options)
    return report(options, found, table_of(options.what, found))


if __name__ == "__main__":
    run(main)
