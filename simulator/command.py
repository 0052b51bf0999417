"""`tandem simulate`."""

from __future__ import annotations

import argparse
import time

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.loadgen.options import service_level
from tandem.simulator.options import add_costs, add_traffic, costs_of, slo_of, traffic_of
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.show import progress, render
from tandem.simulator.simulation import SimulationSetup, simulate


class SimulationResult(msgspec.Struct, frozen=True):
    """What `-o json` prints."""

    report: SimulationReport
    wall_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_costs(parser)
    add_traffic(parser)
    shown = parser.add_argument_group("what is asked for")
    shown.add_argument(
        "--slo",
        type=service_level,
        metavar="LIMITS",
        help="such as ttft=2s,itl=100ms (default: what the settings say under slo)",
    )
    shown.add_argument(
        "--machines",
        type=int,
        metavar="N",
        help="for all pools together, where pools.*.max lets them grow (default: one for each node)",
    )
    shown.add_argument(
        "--one-machine",
        action="store_true",
        help="all nodes share one machine, as `make serve` starts them, and slow each other",
    )
    shown.add_argument(
        "--step-by-step", action="store_true", help="take every step alone: the same answer, much later"
    )


def run(options: argparse.Namespace, config: TandemConfig, *, as_json: bool) -> SimulationResult:
    config, slo = slo_of(options, config)
    if options.machines is not None and options.machines < 1:
        raise ConfigurationError(f"--machines must be at least 1, not {options.machines}")
    setup = SimulationSetup(
        config,
        costs_of(options),
        traffic_of(options),
        slo,
        machines=options.machines,
        by_steps=options.step_by_step,
        one_machine=options.one_machine,
    )
    setup.check()
    console = Console(stderr=as_json)
    began = time.monotonic()
    with progress(console, "simulating") as on_progress:
        report = simulate(setup, on_progress)
    result = SimulationResult(report, time.monotonic() - began)
    if not as_json:
        console.print(render(report, result.wall_s))
    return result
