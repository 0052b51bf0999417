"""Whether the simulator predicts real runs, and how the autoscaler does in it.

    python -m benchmarks.simulation validate --url URL [--costs FILE] [--loads N] [--lengths F] [--json FILE]
    python -m benchmarks.simulation autoscaler --costs FILE [--trace FILE] [--most N] [--json FILE]

`validate` sends ten loads to a running cluster (one node of each role, or one aggregated node) with `tandem bench`, measures its costs as
`tandem profile` does, sends the loads once more from the last to the first, and simulates the same arrivals and lengths on as many nodes.
It compares the medians of the time to first token and of the time per token: the simulator's error next to the difference of the two
real runs. A machine that is shared becomes faster and slower within minutes; in this order each load's two runs lie as long before the
costs as after them. Prompts are token ids without a common prefix; the cluster must have no other traffic. `--costs`: simulate with these,
measured at another time.

`autoscaler` lets Tandem's autoscaler size both pools for a trace, and compares it with the smallest constant sizes that keep the same limits, which
can only be found with knowledge of the whole trace. Without a trace, the load doubles twice and halves twice: abruptly every ten minutes, and
then gradually.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import Floor, at_most, seen, table_of
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.models.store import find_model_here
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow, read_trace
from tandem.simulator.costs import CostModel, read_costs
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.plan_command import evaluator, least_by_width
from tandem.simulator.planner import Planner
from tandem.simulator.profile import profile
from tandem.simulator.show import progress
from tandem.simulator.simulation import SimulationSetup, simulate
from tandem.simulator.traffic import PlayedTraffic, RecordedTraffic, SyntheticTraffic
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
RATES, LEVEL_S = (
    (4.0, 8.0, 16.0, 8.0, 4.0),
    600.0,
)  # a load that doubles and halves: requests per second, and for how many seconds
LIMITS = ServiceLevel(ttft=2.0, itl=0.1)
console = Console(stderr=True)


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
            console.print(f"{run} run of {loads[number]}: TTFT p50, TPOT p50, TTFT p99 in ms: {said}")

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
    with console.status("measures the costs") as status:
        said = 0

        def say(what: str, share: float) -> None:
            nonlocal said
            status.update(f"measures the costs, {share:.0%}: {what}")
            # A log file does not show the status line, so each tenth of the way is printed as well.
            if 10 * share >= said:
                console.print(f"{share:.0%} of the costs is measured")
                said += 1

        return asyncio.run(profile(url, None, "measured", say))


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


def doubling_and_halving(at_once: bool) -> PlayedTraffic:
    """Keeps each rate for ten minutes, or moves from each rate to the next in ten minutes."""
    rng = random.Random(1)
    rows: list[TraceRow] = []
    now, length = 0.0, LEVEL_S * (len(RATES) if at_once else len(RATES) - 1)
    while now < length:
        level, into = divmod(now, LEVEL_S)
        here = RATES[int(level)]
        rate = here if at_once else here + (RATES[int(level) + 1] - here) * into / LEVEL_S
        now += rng.expovariate(rate)
        prompt, answer = (round(tokens * rng.uniform(1 - SPREAD, 1 + SPREAD)) for tokens in (256, 64))
        rows.append(TraceRow(now, prompt, answer))
    return PlayedTraffic(rows)


def turns(report: SimulationReport, role: str) -> int:
    """Returns how often a pool's growth is followed by a shrinking, or the other way round."""
    sizes = [change.size for change in report.changes if change.role == role]
    steps = [there - here for here, there in pairwise(sizes)]
    return sum((one > 0) != (other > 0) for one, other in pairwise(steps))


def autoscaler(options: argparse.Namespace) -> list[dict[str, Any]]:
    costs = dict.fromkeys(Role, read_costs(options.costs))
    pool = PoolConfig(nodes=options.begin, min=1, max=options.most)
    config = TandemConfig(pools=PoolsConfig(prefill=pool, decode=pool))
    if options.trace is None:
        rows = []
        for name, at_once in (("doubles and halves at once", True), ("within ten minutes", False)):
            with progress(console, name) as on_progress:
                setup = SimulationSetup(config, costs, doubling_and_halving(at_once), LIMITS)
                rows.append(_row(name, simulate(setup, on_progress)))
        return rows
    traffic = RecordedTraffic().of(read_trace(options.trace, options.requests))
    with progress(console, "scaled by its load") as on_progress:
        scaled = simulate(SimulationSetup(config, costs, traffic, LIMITS), on_progress)
    rows = [_row("the autoscaler", scaled)]
    with progress(console, "constant sizes") as on_progress:
        of_one_width = {role: {costs[role].width: costs[role]} for role in ENGINE_ROLES}
        evaluate = evaluator(
            lambda settings: TandemConfig(), of_one_width, traffic, LIMITS, options.attainment, lambda what: on_progress
        )
        least = least_by_width(of_one_width, traffic)
        prices = {"prefill": 1.0, "decode": 1.0, "aggregated": 1e6}  # of two roles, as the autoscaler's are
        plan = Planner(evaluate, prices, options.attainment, options.most, least).plan()
    if plan.chosen is not None:
        rows.append(_row(f"{plan.chosen.layout} all the time", plan.chosen.report))
    return rows


def _row(name: str, report: SimulationReport) -> dict[str, Any]:
    return {
        "name": name,
        "attainment": report.attainment,
        "node_hours": sum(report.node_seconds.values()) / 3600,
        "changes": len(report.changes),
        "turns": {role: turns(report, role) for role in ("prefill", "decode")},
        "sizes": [(round(change.at), change.role, change.size) for change in report.changes],
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("validate", "autoscaler"))
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2", help="that the cluster serves (%(default)s)")
    parser.add_argument("--loads", type=int, default=len(LOADS))
    parser.add_argument("--lengths", type=float, default=1.0, help="of prompts and answers, times the usual")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, help="the first of the trace")
    parser.add_argument("--begin", type=int, default=2, help="nodes of each pool at the beginning")
    parser.add_argument("--most", type=int, default=32, help="nodes of each pool")
    parser.add_argument("--attainment", type=float, default=0.95, help="that the constant sizes must keep")
    options = parser.parse_args()
    if options.what == "autoscaler" and options.costs is None:
        parser.error(f"{options.what} needs --costs FILE")
    if options.what == "validate":
        found = validate(options)
        table, floors = shown(found["loads"])
        return report(options, found, table, floors=floors)
    rows = autoscaler(options)
    return report(options, rows, json.dumps(rows, indent=1))


if __name__ == "__main__":
    run(main)
