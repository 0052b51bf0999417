"""`tandem what-if`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing

from rich.console import Console
from rich.table import Table

from tandem.base.errors import ConfigurationError, TandemError
from tandem.cluster.api_client import ApiClient, key_from_environment
from tandem.cluster.commands.address import RAY_ADDRESS, WhichCluster
from tandem.cluster.commands.operate import with_controller
from tandem.cluster.commands.output import add_output, print_found, wants_json
from tandem.cluster.commands.router_url import choose_url
from tandem.cluster.commands.setting_options import add_settings, read_settings
from tandem.cluster.control import CoresView
from tandem.cluster.describe import format_seconds, parse_sizes
from tandem.cluster.orders import CoresOrder
from tandem.router.page_state import PageState
from tandem.simulator.change import INSIDE, change_of
from tandem.simulator.learnt import learnt_costs
from tandem.simulator.options import add_costs, given_costs
from tandem.simulator.show import progress
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import ENGINE_ROLES, Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sizes", nargs="+", metavar="ROLE=N", help="nodes of a pool, such as prefill=3; the other pools stay"
    )
    parser.add_argument("--url", help="of a router (default: that of the `tandem serve` on this machine)")
    add_costs(parser, "nodes (default: as this cluster's have learnt)", required=False)
    add_settings(parser, serves=False)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    wanted, config, url = _sizes(options.sizes), read_settings(options).config, choose_url(options.url)
    console = Console(stderr=wants_json(options))
    with closing(ApiClient(url, key_from_environment())) as client:
        state = client.read("/ui/state", PageState)
    costs = given_costs(options) or learnt_costs(url).costs
    cores = _cores(options.url, wanted)
    with progress(console, "simulating") as on_progress:
        change = change_of(state, wanted, config, costs, on_progress, cores=(cores.now, cores.then))
    print_found(options, change, lambda: _show(console, change))
    return 0


def _cores(url: str | None, wanted: Mapping[Role, int]) -> CoresView:
    """The cores of the nodes, now and then, as the controller knows the machines."""
    try:
        return with_controller(
            WhichCluster(os.environ.get(RAY_ADDRESS)), lambda cluster: cluster.ask(CoresOrder(dict(wanted))), url
        )
    except TandemError as error:
        print(f"note: which cores nodes share is not known, so each is simulated on its own: {error}", file=sys.stderr)
        return CoresView({}, {})


def _sizes(given: Sequence[str]) -> Mapping[Role, int]:
    sizes = parse_sizes(given)
    for role in sizes.keys() - set(ENGINE_ROLES):
        raise ConfigurationError(f"{role.value} nodes are not simulated: {', '.join(ENGINE_ROLES)} are")
    return sizes


def _show(console: Console, change: Forecast) -> None:
    console.print(f"{change.now} → {change.then}, by the last {change.requests} requests, of {change.seconds:.0f} s")
    table = Table(title_justify="left")
    for name in ("", "now", "simulated", "then", f"{INSIDE:.0f}% between"):
        table.add_column(name, justify="right" if name else "left")
    for one in change.expected:
        table.add_row(
            one.what,
            format_seconds(one.measured),
            format_seconds(one.simulated),
            format_seconds(one.then),
            f"{format_seconds(one.low)} and {format_seconds(one.high)}",
        )
    for role in {**change.busy_now, **change.busy_then}:
        now, then = (f"{busy[role]:.0%}" if role in busy else "–" for busy in (change.busy_now, change.busy_then))
        table.add_row(f"{role} nodes busy", "", now, then, "")
    console.print(table)
