"""`tandem plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.cluster.commands.output import add_output, print_found, wants_json
from tandem.cluster.commands.setting_options import add_settings, read_settings
from tandem.cluster.config import MOST_NODES, TandemConfig
from tandem.cluster.saving import check_file
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.options import service_level
from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import CostModel, Width
from tandem.simulator.options import (
    CostsByWidth,
    add_costs,
    add_traffic,
    check_widths,
    costs_by_width,
    money,
    slo_of,
    traffic_of,
)
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.picture import draw
from tandem.simulator.planner import Evaluate, Plan, Planner, PoolSizes, Trial, least_nodes
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import OnProgress, simulate
from tandem.simulator.traffic import PlayedTraffic
from tandem.wire.nodes import ENGINE_ROLES, Role

MOST_ROWS = 16
Configure = Callable[[Mapping[str, str]], TandemConfig]
"""Returns the given configuration with these settings, by name, on top."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_costs(parser, several=True)
    add_traffic(parser)
    add = adder(parser.add_argument_group("what is asked for"))
    add("--slo", "LIMITS", service_level, "such as ttft=2s,itl=100ms (default: the settings' slo)")
    prices = "of each of a node's devices in an hour, such as prefill=2.5,decode=2 (aggregated: the dearer of these, unless it is named)"
    add("--cost", "PRICES", money, prices, required=True)
    add("--attainment", "SHARE", 0.99, "of the requests that must be within the limits (%(default)s)")
    add("--most-nodes", "N", 64, "of a role that are tried (%(default)s)")
    add("--picture", "FILE", Path, "goodput against cost, as .svg")
    add_settings(parser, serves=False)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    def configure(more: Mapping[str, str]) -> TandemConfig:
        given = argparse.Namespace(**vars(options))
        given.set = [*options.set, *(f"{name}={value}" for name, value in more.items())]
        return read_settings(given).config

    if not 0.0 < options.attainment <= 1.0:
        raise ConfigurationError(f"--attainment must be above 0 and at most 1, not {options.attainment:g}")
    if not 1 <= options.most_nodes <= MOST_NODES:
        raise ConfigurationError(f"--most-nodes must be from 1 to {MOST_NODES}, not {options.most_nodes}")
    if options.picture is not None:
        if options.picture.suffix != ".svg":
            raise ConfigurationError(f"--picture must end in .svg, not {options.picture.name}")
        check_file(options.picture)
    prices = dict(options.cost)
    if missing := [role for role in ("prefill", "decode") if role not in prices]:
        raise ConfigurationError(f"--cost must name what a {' and a '.join(missing)} node costs")
    prices.setdefault("aggregated", max(prices.values()))
    costs, traffic = costs_by_width(options), traffic_of(options)
    config, slo = slo_of(options, configure({}))
    check_widths(config, costs)
    console = Console(stderr=wants_json(options))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task("planning", total=1.0)

        def say(what: str) -> OnProgress:
            shown.update(row, description=what, completed=0.0)
            return lambda share, seconds, running: shown.update(row, completed=share)

        evaluate = evaluator(configure, costs, traffic, slo, options.attainment, say)
        planner = Planner(evaluate, prices, options.attainment, options.most_nodes, least_by_width(costs, traffic))
        plan = planner.plan()
    print_found(options, plan, lambda: console.print(render(plan, slo)))
    if options.picture is not None:
        title = f"within {slo}, by cost"
        try:
            options.picture.write_text(draw(plan.trials, plan.chosen, title), encoding="utf-8")
        except OSError as error:  # the plan has been printed
            print(f"tandem: {options.picture} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    return 0 if plan.chosen is not None else 1


def evaluator(
    configure: Configure,
    costs: CostsByWidth,
    traffic: PlayedTraffic,
    slo: ServiceLevel,
    target: float,
    say: Callable[[str], OnProgress],
) -> Evaluate:
    def evaluate(layout: PoolSizes, settings: Mapping[str, str], faster: float) -> SimulationReport:
        config = configure(settings)
        config = msgspec.structs.replace(config, pools=layout.pools(config.pools))
        of_nodes = {role: costs[role][layout.widths.of(role)] for role in ENGINE_ROLES}
        rows = [
            TraceRow(row.arrival_s / faster, row.input_tokens, row.output_tokens, row.blocks) for row in traffic.rows
        ]
        played = PlayedTraffic(rows, traffic.block_tokens)
        what = " ".join([str(layout), *settings.values(), *([f"{faster:g} times as fast"] if faster != 1 else [])])
        setup = SimulationSetup(config, of_nodes, played, slo, give_up_below=target)
        return simulate(setup, say(what))

    return evaluate


def least_by_width(costs: CostsByWidth, traffic: PlayedTraffic) -> dict[Role, dict[Width, int]]:
    found: dict[Role, dict[Width, int]] = {}
    for role in ENGINE_ROLES:
        of_role = {
            width: least_work(dict.fromkeys(ENGINE_ROLES, model), traffic)[role] for width, model in costs[role].items()
        }
        found[role] = {width: least_nodes({role: work}, traffic.seconds)[role] for width, work in of_role.items()}
    return found


def least_work(costs: Mapping[Role, CostModel], traffic: PlayedTraffic) -> dict[Role, float]:
    """A lower bound on the seconds that nodes of each role spend on the traffic: each distinct block is computed once, at the best rate."""
    seen: set[int] = set()
    to_read = to_write = 0
    for row in traffic.rows:
        new = [name for name in row.blocks if name not in seen]
        seen.update(new)
        known = (len(row.blocks) - len(new)) * traffic.block_tokens
        to_read += max(1, row.input_tokens - known)
        to_write += max(0, row.output_tokens - 1)
    reading = {role: to_read * _best_rate(costs[role], reads=True) for role in ENGINE_ROLES}
    writing = {role: to_write * _best_rate(costs[role], reads=False) for role in ENGINE_ROLES}
    return {
        Role.PREFILL: reading[Role.PREFILL],
        Role.DECODE: writing[Role.DECODE],
        Role.AGGREGATED: max(reading[Role.AGGREGATED], writing[Role.AGGREGATED]),
    }


def _best_rate(costs: CostModel, *, reads: bool) -> float:
    table = costs.prefill if reads else costs.decode
    return min(min(row) / size for size, row in zip(table.sizes, table.seconds, strict=True) if size > 0)


def render(plan: Plan, slo: ServiceLevel) -> RenderableType:
    table = Table(title=f"for {slo}", title_justify="left")
    for name in ("nodes", "settings", "an hour", "within", "goodput/s", "TTFT p99 ms", "ITL p99 ms"):
        is_text = name in ("nodes", "settings")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "nodes", overflow="fold")
    shown = sorted(plan.trials, key=lambda trial: (trial != plan.chosen, trial.given_up, trial.cost))
    for trial in shown[:MOST_ROWS]:
        table.add_row(*_cells(trial), style="bold" if trial == plan.chosen else "")
    lines = [f"{len(plan.trials)} clusters were simulated"]
    if plan.chosen is not None:
        lines.append(f"take {plan.chosen.layout}: {plan.chosen.cost:.2f} an hour")
        lines.append(f"in tandem.yaml: pools: {_as_settings(plan.chosen.layout)}")
    lines += plan.why
    if plan.breaks_first:
        lines.append(f"what gives way first: {plan.breaks_first}")
    return Group(table, *(Text(line) for line in lines))


def _as_settings(layout: PoolSizes) -> str:
    pools = []
    for role in ENGINE_ROLES:
        width = layout.widths.of(role)
        said = {
            "nodes": layout.of(role),
            **({"tensor_parallel": width.tensor_parallel} if width.tensor_parallel > 1 else {}),
            **({"pipeline_parallel": width.pipeline_parallel} if width.pipeline_parallel > 1 else {}),
        }
        if layout.of(role):
            pools.append(f"{role.value}: {{{', '.join(f'{name}: {value}' for name, value in said.items())}}}")
    return f"{{{', '.join(pools)}}}"


def _cells(trial: Trial) -> list[str]:
    settings = " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in trial.settings.items())
    if trial.given_up:
        return [str(trial.layout), settings, f"{trial.cost:.2f}", "too few", "", "", ""]
    report = trial.report
    return [
        str(trial.layout),
        settings,
        f"{trial.cost:.2f}",
        f"{trial.attainment:.1%}",
        f"{trial.goodput_per_s:.2f}",
        f"{report.ttft_ms.p99:.0f}" if report.ttft_ms else "–",
        f"{report.itl_ms.p99:.1f}" if report.itl_ms else "–",
    ]
