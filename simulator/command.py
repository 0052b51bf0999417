"""`tandem simulate`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.cluster.commands.output import add_output, print_found, wants_json
from tandem.cluster.commands.setting_options import add_settings, read_settings
from tandem.cluster.config import TandemConfig
from tandem.loadgen.options import service_level
from tandem.simulator.costs import CostModel, Width
from tandem.simulator.options import add_costs, add_traffic, costs_of, slo_of, traffic_of
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.show import progress, render
from tandem.simulator.simulation import simulate
from tandem.wire.nodes import ENGINE_ROLES, Role


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
    _check_widths(config, costs)
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


def _check_widths(config: TandemConfig, costs: Mapping[Role, CostModel]) -> None:
    """A simulated node takes the times of its costs, whatever the settings say of its ranks."""
    for role in ENGINE_ROLES:
        pool, of_costs = config.pools.of(role), costs[role].width
        asked = Width(pool.tensor_parallel, pool.pipeline_parallel)
        if pool.last_size and asked.ranks > 1 and asked != of_costs:
            raise ConfigurationError(
                f"the settings ask for {role.value} nodes of {asked}, and the costs are of nodes of {of_costs}: profile such a node"
            )
