"""Whether the simulator predicts real runs.

    python -m benchmarks.simulation --url URL [--costs FILE] [--loads N] [--lengths F] [--json FILE]

Sends ten loads to a running cluster (one node of each role, or one aggregated node) with `tandem bench`, measures its costs as
`tandem profile` does, sends the loads once more from the last to the first, and simulates the same arrivals and lengths on as many nodes.
It compares the medians of the time to first token and of the time per token: the simulator's error next to the difference of the two
real runs. A machine that is shared becomes faster and slower within minutes; in this order each load's two runs lie as long before the
costs as after them. Prompts are token ids without a common prefix; the cluster must have no other traffic. `--costs`: simulate with these,
measured at another time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.table import Table

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.tables import Floor, at_most, seen, table_of
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.models.store import find_model_here
from tandem.loadgen.traces import read_trace
from tandem.simulator.costs import CostModel, read_costs
from tandem.simulator.profile import profile
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import simulate
from tandem.simulator.traffic import RecordedTraffic, SyntheticTraffic
from tandem.wire.nodes import ENGINE_ROLES, Role

# (requests per second, tokens of a prompt, tokens of an answer), each for the same number of seconds.
LOADS = (
    (0.5, 256, 64), (1.0, 256, 64), (2.0, 256, 64), (0.5, 1024, 64), (1.0, 1024, 64),
    (0.5, 512, 128), (1.0, 512, 128), (1.5, 512, 32), (3.0, 128, 64), (0.3, 2048, 32),
)  # fmt: skip
LOAD_S = 60.0
# The most that a simulation may be off in the median over the loads: so much more than two real runs, and at the 99th percentile
ABOVE, P99_BAR = 0.03, 0.15
SPREAD = 0.3


def write_trace(load: tuple[float, int, int], seed: int, file: Path) -> None:
    """Writes a trace in Azure's format, so that both sides read the same arrivals and lengths."""
    rate, prompt, answer = load
    began = datetime(2024, 1, 1)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for row in SyntheticTraffic(rate, LOAD_S, prompt, answer, SPREAD).make(seed).rows:
        lines.append(f"{began + timedelta(seconds=row.arrival_s)},{row.input_tokens},{row.output_tokens}")
    file.write_text("\n".join(lines) + "\n")


def real_run(url: str, trace: Path, seed: int, folder: Path, tokenizer: str) -> dict[str, Any]:
    answer = folder / "bench.json"
    subprocess.run(
        [
            Path(sys.executable).parent / "tandem", "bench", "--url", url, "--workload", "trace", "--trace", trace,
            "--prompt-format", "ids", "--tokenizer", tokenizer, "--seed", str(seed), "--json", answer,
        ],
        check=True, stdout=subprocess.DEVNULL, timeout=900,
    )  # fmt: skip
    (summary,) = json.loads(answer.read_text())["summaries"]
    return dict(summary)


def medians(of: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the medians of the time to first token and of the time per token, and the 99th percentile of the first."""
    return of["ttft_ms"]["p50"], of["tpot_ms"]["p50"], of["ttft_ms"]["p99"]


def validate(options: argparse.Namespace) -> dict[str, Any]:
    nodes = httpx.get(f"{options.url}/cluster").json()["nodes"]
    roles = [Role(node["role"]) for node in nodes]
    one_machine = len({node["request_endpoint"].rpartition(":")[0] for node in nodes}) == 1
    prefill, decode, aggregated = (PoolConfig(nodes=roles.count(role)) for role in ENGINE_ROLES)
    config = TandemConfig(pools=PoolsConfig(prefill=prefill, decode=decode, aggregated=aggregated))
    loads = [
        (rate, round(prompt * options.lengths), round(answer * options.lengths))
        for rate, prompt, answer in LOADS[: options.loads]
    ]
    tokenizer = find_model_here(options.model, lambda what, share: None)
    costs = read_costs(options.costs) if options.costs is not None else None
    rows: list[dict[str, Any]] = [{"load": load} for load in loads]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces = [folder / f"{number}.csv" for number in range(len(loads))]
        for number, load in enumerate(loads):
            write_trace(load, number, traces[number])

        def play(number: int, run: str) -> None:
            seed = random.randrange(1 << 31)  # so that no node has the prompts in its cache
            found = medians(real_run(options.url, traces[number], seed, folder, tokenizer))
            rows[number][run] = found
            # Printed at once, so that a run that is cut off has reported what it found.
            said = ", ".join(f"{value:.1f}" for value in found)
            say(f"{run} run of {loads[number]}: TTFT p50, TPOT p50, TTFT p99 in ms: {said}")

        for number in range(len(loads)):
            play(number, "first")
        costs = costs or measured(options.url)
        for number in reversed(range(len(loads))):
            play(number, "second")
        for row, trace in zip(rows, traces, strict=True):
            traffic = RecordedTraffic().of(read_trace(trace))
            setup = SimulationSetup(config, dict.fromkeys(Role, costs), traffic, one_machine=one_machine)
            row["simulated"] = medians(msgspec.to_builtins(simulate(setup)))
    return {"costs": msgspec.to_builtins(costs), "loads": rows}


def measured(url: str) -> CostModel:
    tenths: set[int] = set()

    def say_each_tenth(what: str, share: float) -> None:
        if (tenth := int(10 * share)) not in tenths:
            tenths.add(tenth)
            say(f"{share:.0%} of the costs is measured: {what}")

    return asyncio.run(profile(url, None, "measured", say_each_tenth))


def shown(rows: list[dict[str, Any]]) -> tuple[Table, list[Floor]]:
    columns = {"load": "{load[0]:g}/s {load[1]}+{load[2]}"}
    for which, name in enumerate(("TTFT p50 ms", "TPOT p50 ms")):
        columns |= {
            f"{name}: real": f"{{first[{which}]:.1f}}",
            f"{name}: again": f"{{second[{which}]:.1f}}",
            f"{name}: simulated": f"{{simulated[{which}]:.1f}}",
        }
    floors: list[Floor] = []
    for which, (name, bar) in enumerate((("TTFT p50", None), ("TPOT p50", None), ("TTFT p99", P99_BAR))):
        errors, noise = [], []
        for row in rows:
            first, second, said = (row[run][which] for run in ("first", "second", "simulated"))
            errors.append(abs(said / statistics.fmean((first, second)) - 1))
            noise.append(abs(second / first - 1))
        between = statistics.median(noise)
        floors.append(seen(f"{name}: two real runs apart, in the median", 100 * between, "%"))
        most = 100 * (bar or between + ABOVE)
        floors.append(at_most(f"{name}: simulated off", 100 * statistics.median(errors), most, "%"))
    return table_of("the simulator beside two real runs of each load", rows, columns), floors


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2", help="that the cluster serves (%(default)s)")
    parser.add_argument("--loads", type=int, default=len(LOADS))
    parser.add_argument("--lengths", type=float, default=1.0, help="of prompts and answers, times the usual")
    options = parser.parse_args()
    found = validate(options)
    table, floors = shown(found["loads"])
    return report(options, found, table, floors=floors)


if __name__ == "__main__":
    run(main)
