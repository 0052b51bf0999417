"""The product's autoscaler on five loads, in simulation.

    python -m benchmarks.autoscaler --traces FOLDER [--loads NAME ...] [--json FILE]

Every fourth request of Azure's hour of code and of Mooncake's hour, and three made loads of 2,000 tokens in and 200 out: one that triples at once,
one that quadruples for three minutes, and one that rises and falls in forty. Costs are four times those of `benchmarks/quotes.py`. Both pools
begin with four nodes and may have 1 to 32; a node serves 30 s after its order. A request is in time with its first token within 10 s and 100 ms
for each further one. A decision is reversed if its pool goes the other way within ten minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.tables import table_of
from benchmarks.quotes import COSTS, with_large_blocks
from tandem.cluster.config import PoolConfig, PoolsConfig, SloConfig, TandemConfig
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow, read_trace
from tandem.loadgen.workload import Lengths
from tandem.simulator.outcome import SimulationReport, SizeChange
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import simulate
from tandem.simulator.traffic import PlayedTraffic, RecordedTraffic
from tandem.wire.nodes import Role

MINUTE = 60.0
SLO = SloConfig(ttft_s=10.0, inter_token_s=0.1)
FIRST, MOST = 4, 32
SLOWER = 4.0
EVERY = 4  # request of a trace
REVERSED_WITHIN_S = 10 * MINUTE
INPUT, OUTPUT, SPREAD = 2000, 200, 0.5
STEADY = 4.0  # requests a second


def step(at: float) -> float:
    return STEADY if at < 15 * MINUTE else 3 * STEADY


def spike(at: float) -> float:
    return 4 * STEADY if 15 * MINUTE <= at < 18 * MINUTE else STEADY


def ramp(at: float) -> float:
    return STEADY / 2 + 2.5 * STEADY * (1 - abs(at / (20 * MINUTE) - 1))


def made(rate: Callable[[float], float], minutes: float) -> PlayedTraffic:
    """Requests at random times, so many a second at each moment."""
    rng, lengths, most = np.random.default_rng(0), Lengths(INPUT, OUTPUT, SPREAD), 4 * STEADY
    rows, at = [], 0.0
    while (at := at + float(rng.exponential(1 / most))) < minutes * MINUTE:
        if rng.random() < rate(at) / most:
            rows.append(TraceRow(at, lengths.draw_input(rng), lengths.draw_output(rng)))
    return PlayedTraffic(rows)


def recorded(trace: Path) -> PlayedTraffic:
    return RecordedTraffic().of(read_trace(trace)[::EVERY])


LOADS: dict[str, Callable[[Path], PlayedTraffic]] = {
    "three times at once": lambda traces: made(step, 30),
    "four times for three minutes": lambda traces: made(spike, 40),
    "up and down in forty minutes": lambda traces: made(ramp, 40),
    "Azure's hour": lambda traces: recorded(traces / "azure_code_2023.csv"),
    "Mooncake's trace": lambda traces: recorded(traces / "mooncake_conversation.jsonl"),
}


def play(traffic: PlayedTraffic) -> SimulationReport:
    pool = PoolConfig(nodes=FIRST, min=1, max=MOST)
    config = with_large_blocks(TandemConfig(pools=PoolsConfig(prefill=pool, decode=pool), slo=SLO))
    costs = msgspec.structs.replace(COSTS, prefill=COSTS.prefill.times(SLOWER), decode=COSTS.decode.times(SLOWER))
    slo = ServiceLevel(ttft=SLO.ttft_s, tpot=SLO.inter_token_s)
    return simulate(SimulationSetup(config, dict.fromkeys(Role, costs), traffic, slo))


def reversed_of(changes: Sequence[SizeChange]) -> int:
    """Returns how many changes took back the one before."""
    found, last = 0, {role.value: (-REVERSED_WITHIN_S, False, FIRST) for role in Role}
    for change in changes:
        at, grew, size = last[change.role]
        grows = change.size > size
        found += grows is not grew and change.at - at < REVERSED_WITHIN_S
        last[change.role] = change.at, grows, change.size
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--traces", type=Path, required=True, help="the folder of azure_code_2023.csv and mooncake_conversation.jsonl"
    )
    parser.add_argument("--loads", nargs="+", metavar="NAME", default=list(LOADS), choices=list(LOADS))
    options = parser.parse_args()
    rows = []
    for name in options.loads:
        told = play(LOADS[name](options.traces))
        say(f"{name}: " + "; ".join(f"{change.at:.0f} s {change.why}" for change in told.changes))
        rows.append(
            {
                "load": name,
                "requests": told.requests,
                "in time": round(told.attainment or 0.0, 4),
                "node-seconds": round(sum(told.node_seconds.values())),
                "decisions": len(told.changes),
                "reversed": reversed_of(told.changes),
            }
        )
    return report(options, rows, table_of("the autoscaler on five loads", rows))


if __name__ == "__main__":
    run(main)
