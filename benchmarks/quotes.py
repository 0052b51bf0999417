"""How many of a router's quotes are kept, in simulation.

    python -m benchmarks.quotes --trace FILE [--speed X ...] [--requests N] [--nodes N] [--json FILE]

Every request of a trace is told, at each of four confidences, by when its first token comes, as `X-Tandem-Quote` does. The nodes are alike, half
of them prefill nodes; costs are written by hand, near those of a model of 8 billion weights on a GPU. Each load is played three times: on steady
nodes; on nodes that read prompts in 1.6 times the time during the middle third of the traffic; and on nodes that take 3% longer forty times, which
is three times as long at the end.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.loadgen.traces import read_trace
from tandem.router.dispatch import Dispatcher, Generation
from tandem.router.dispatch.ledger import RequestTimings
from tandem.router.quotes.wing import QuoteMaker
from tandem.simulator.costs import CostModel, CostTable, RequestCost, StepBound, TransferCost
from tandem.simulator.node import SimulatedNode
from tandem.simulator.pools import SimulatedPools
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import simulate
from tandem.simulator.traffic import RecordedTraffic
from tandem.wire.nodes import Role

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
    costs = node._costs
    node._costs = msgspec.structs.replace(costs, prefill=costs.prefill.times(times))
    node._bound = StepBound(node._costs, BUDGET)


def with_large_blocks(config: TandemConfig) -> TandemConfig:
    return msgspec.structs.replace(
        config,
        cache=msgspec.structs.replace(config.cache, block_size=BLOCK),
        scheduler=msgspec.structs.replace(config.scheduler, max_num_batched_tokens=BUDGET),
    )


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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--speed", type=float, nargs="+", default=[1.2, 1.6, 2.0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=16)
    options = parser.parse_args()
    found = quotes(options)
    return report(options, found, table_of("quotes", found))


if __name__ == "__main__":
    run(main)
