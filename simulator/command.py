"""`tandem simulate`."""

from __future__ import annotations

import argparse
import time

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.cluster.commands.output import add_output, print_found, wants_json
from tandem.cluster.commands.setting_options import add_settings, read_settings
from tandem.loadgen.options import service_level
from tandem.simulator.options import add_costs, add_traffic, check_widths, costs_of, slo_of, traffic_of
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.show import progress, render
from tandem.simulator.simulation import simulate


class SimulationResult(msgspec.Struct, frozen=True):
    """What `-o json` prints."""

    report: SimulationReport
    wall_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_costs(parser)
    add_traffic(parser)
    add = adder(parser.add_argument_group("what is asked for"))
    add("--slo", "LIMITS", service_level, "such as ttft=2s,itl=100ms (default: what the settings say under slo)")
    machines = "for all pools together, where pools.*.max lets them grow (default: one for each node)"
    add("--machines", "N", int, machines)
    shared = "all nodes share one machine, as `make serve` starts them, and slow each other"
    add("--one-machine", None, False, shared)
    add("--step-by-step", None, False, "take every step alone: the same answer, much later")
    add_settings(parser, serves=False)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    config, slo = slo_of(options, read_settings(options).config)
    if options.machines is not None and options.machines < 1:
        raise ConfigurationError(f"--machines must be at least 1, not {options.machines}")
    costs = costs_of(options)
    check_widths(
        config, {role: {model.width: model} for role, model in costs.items() if config.pools.of(role).last_size}
    )
    setup = SimulationSetup(
        config,
        costs,
        traffic_of(options),
        slo,
        machines=options.machines,
        by_steps=options.step_by_step,
        one_machine=options.one_machine,
    )
    setup.check()
    console = Console(stderr=wants_json(options))
    began = time.monotonic()
    with progress(console, "simulating") as on_progress:
        report = simulate(setup, on_progress)
    result = SimulationResult(report, time.monotonic() - began)
    print_found(options, result, lambda: console.print(render(report, result.wall_s)))
    return 0
