"""What foresight is worth, in simulation: for routing, and for `tandem what-if`.

    python -m benchmarks.foresight routing --trace FILE [--speed X ...] [--requests N] [--ttft S] [--json FILE]
    python -m benchmarks.foresight changes [--changes N] [--json FILE]

`routing`: eight prefill and eight decode nodes of unlike speed (four whole, three at three quarters, one at half); a prefill node becomes half as
fast after a third of the traffic. The product's router chooses nodes by `least_wait`, by `prefix_affinity`, and by two oracles, which know what
no router can: each node's true costs, the step under way, its line, and what its cache has at this moment. `soonest` takes the prefill node
with the soonest first token, and the decode node with the shortest next step; `soonest, twice` counts the prompt's own computing a second
time, as `least_wait` does. Costs are written by hand, near those of a model of 8 billion weights on a GPU. Goodput: requests a second with the
first token in time and 20 ms for each further one.

`changes`: a cluster whose costs are hidden serves a minute of requests; what a change of its prefill nodes brings is said with costs that are up to
15% off, and graded as a serving cluster grades it, by other requests like these on the changed cluster: how often the interval has the outcome.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.pools.foresight.grading import grade, score_of
from tandem.engine.request import Request
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import read_trace
from tandem.router.config import PolicyName
from tandem.router.policy.choose import Chooser
from tandem.router.policy.views import RoutingDecision, RoutingRequest
from tandem.router.prefixes import PromptHashes
from tandem.simulator.costs import CostModel, CostTable, RequestCost, StepBound, TransferCost
from tandem.simulator.node import SimulatedNode
from tandem.simulator.pools import SimulatedPools
from tandem.simulator.simulation import SimulationSetup, simulate
from tandem.simulator.traffic import NameHasher, RecordedTraffic
from tandem.wire.nodes import Role
from tandem.wire.requests import Submit
from tests.simulator.test_change import said, slower

BLOCK, BUDGET = 512, 8192
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.75, 0.75, 0.75, 0.5)
HALVES_AFTER = 0.3  # of the traffic's time
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


class UnlikePools(SimulatedPools):
    """`latest` is the one that simulates now."""

    latest: UnlikePools

    def __init__(self, *args: Any, halves_at: float, **more: Any) -> None:
        UnlikePools.latest = self
        super().__init__(*args, **more)
        for role in (Role.PREFILL, Role.DECODE):
            for node, speed in zip(self.of(role), SPEEDS, strict=True):
                _slow(node, 1 / speed)
        self._loop.call_at(halves_at, _slow, self.of(Role.PREFILL)[0], 2.0)

    def of(self, role: Role) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.info.role is role]


def _slow(node: SimulatedNode, times: float) -> None:
    node._costs = slower(node._costs, times, times)
    node._bound = StepBound(node._costs, BUDGET)


class Prompt:
    """What a cache looks a prompt up by."""

    def __init__(self, tokens: list[int]) -> None:
        self.all_token_ids = tokens
        self.block_hashes: list[bytes] = []
        NameHasher(BLOCK).extend(self.block_hashes, cast("Request", self))


class Oracle(Chooser):
    own_counts = 1

    def choose(self, request: RoutingRequest, hashes: PromptHashes) -> RoutingDecision:
        self._turn += 1
        pools, prompt = UnlikePools.latest, Prompt(list(hashes._token_ids))
        readers, writers = pools.of(Role.PREFILL), pools.of(Role.DECODE)
        prefill = self._least(readers, [self._first_token(node, prompt) for node in readers])
        decode = self._least(writers, [_next_step(node, len(prompt.all_token_ids)) for node in writers])
        for node in (prefill, decode):
            self._note([node.info.node_id], self.marks_of(hashes, BLOCK))
        return RoutingDecision(prefill.info, decode.info, "foreseen")

    def _least(self, nodes: list[SimulatedNode], costs: list[float]) -> SimulatedNode:
        places = range(len(nodes))
        return nodes[min(places, key=lambda at: (costs[at], (at + self._turn) % len(nodes)))]

    def _first_token(self, node: SimulatedNode, prompt: Prompt) -> float:
        scheduler, costs = node.scheduler, node._costs
        under_way = node._plan_began + node._plan_s - node._loop.time() if node._plan is not None else 0.0
        cached = scheduler.state.cache.coordinator.find_longest_hit(prompt.block_hashes, len(prompt.all_token_ids) - 1)[
            1
        ]
        line = 0.0
        for request in scheduler.requests.values():
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:
                before = request.num_computed_tokens or scheduler.find_prefix(request)[1]
                line += _read_s(costs, request.num_tokens - before, before)
                cached = max(cached, _shared(prompt.all_token_ids, request.all_token_ids))
        for message in node._inbox:
            if isinstance(message, Submit):
                line += _read_s(costs, len(message.prompt_token_ids), 0)
                cached = max(cached, _shared(prompt.all_token_ids, message.prompt_token_ids))
        own = _read_s(costs, max(len(prompt.all_token_ids) - cached, 1), cached)
        return max(under_way, 0.0) + line + self.own_counts * own


class OracleTwice(Oracle):
    own_counts = 2


POLICIES: dict[str, tuple[PolicyName, type[Chooser]]] = {
    "least_wait": (PolicyName("least_wait"), Chooser),
    "prefix_affinity": (PolicyName("prefix_affinity"), Chooser),
    "soonest": (PolicyName("least_wait"), Oracle),
    "soonest, twice": (PolicyName("least_wait"), OracleTwice),
}


def _read_s(costs: CostModel, tokens: int, before: int) -> float:
    seconds = 0.0
    for start in range(0, tokens, BUDGET):
        seconds += costs.prefill.at(min(BUDGET, tokens - start), before + start)
    return seconds


def _shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count + BLOCK < min(len(one), len(other)) and one[count + BLOCK - 1] == other[count + BLOCK - 1]:
        count += BLOCK
    return count


def _next_step(node: SimulatedNode, tokens: int) -> float:
    coming = [len(each.prompt_token_ids) for each in node._inbox if isinstance(each, Submit)]
    lengths = [*(request.num_tokens for request in node.scheduler.requests.values()), *coming, tokens]
    return node._costs.decode.at(len(lengths), sum(lengths) / len(lengths))


def routing(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = read_trace(options.trace, options.requests)
    slo, found = ServiceLevel(ttft=options.ttft, tpot=0.02), []
    config = TandemConfig(pools=PoolsConfig(prefill=PoolConfig(nodes=8), decode=PoolConfig(nodes=8)))
    config = msgspec.structs.replace(
        config,
        cache=msgspec.structs.replace(config.cache, block_size=BLOCK),
        scheduler=msgspec.structs.replace(config.scheduler, max_num_batched_tokens=BUDGET),
    )
    for speed in options.speed:
        traffic = RecordedTraffic(speed).of(rows, 0)
        for name, (policy, chooser) in POLICIES.items():
            router = msgspec.structs.replace(config.router, policy=policy)
            setup = SimulationSetup(
                msgspec.structs.replace(config, router=router), dict.fromkeys(Role, COSTS), traffic, slo
            )
            halves_at = HALVES_AFTER * traffic.seconds

            def pools(*args: Any, at: float = halves_at, **more: Any) -> UnlikePools:
                return UnlikePools(*args, halves_at=at, **more)

            with (
                mock.patch("tandem.simulator.simulation.Chooser", chooser),
                mock.patch("tandem.simulator.simulation.SimulatedPools", pools),
            ):
                told = simulate(setup)
            first = told.ttft_ms
            found.append(
                {
                    "speed": speed,
                    "routing": name,
                    "goodput per s": round(told.goodput_per_s or 0.0, 2),
                    "in time": round(told.attainment or 0.0, 3),
                    "first token p50, ms": round(first.p50) if first else None,
                    "p90": round(first.p90) if first else None,
                }
            )
    return found


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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["routing", "changes"])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, nargs="+", default=[1.2, 1.6, 2.0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--ttft", type=float, default=4.0)
    parser.add_argument("--changes", type=int, default=100)
    options = parser.parse_args()
    found = routing(options) if options.what == "routing" else changes(options)
    return report(options, found, table_of(options.what, found))


if __name__ == "__main__":
    run(main)
