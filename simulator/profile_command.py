"""`tandem profile`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.cluster.api_client import key_from_environment
from tandem.cluster.commands.output import add_output, print_json, wants_json
from tandem.cluster.commands.router_url import choose_url
from tandem.cluster.saving import check_file, write_json
from tandem.simulator.profile import QUICK, REPEATS, profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    url = "of a cluster with one node of each role, which nothing else asks meanwhile (default: the `tandem serve` on this machine)"
    add("--url", None, str, url)
    add("--out", "FILE", Path, "for the costs", required=True)
    add("--name", None, str, "what these nodes are called (default: the file's name)")
    add("--repeats", "N", REPEATS, "of each measurement (%(default)s)")
    add("--quick", None, False, "fewer points, each measured twice")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    if options.repeats < 1:
        raise ConfigurationError(f"--repeats must be at least 1, not {options.repeats}")
    check_file(options.out)
    console = Console(stderr=wants_json(options))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task("measuring", total=1.0)
        costs = asyncio.run(
            profile(
                choose_url(options.url),
                key_from_environment(),
                options.name or options.out.stem,
                lambda what, share: shown.update(row, description=what, completed=share),
                repeats=2 if options.quick else options.repeats,
                grid=QUICK if options.quick else None,
            )
        )
    write_json(costs, options.out)
    if wants_json(options):
        print_json(costs)
    else:
        for name, fit in costs.fit.items():
            console.print(
                f"{name}: {fit.median:.1%} wrong in the median, {fit.worst:.1%} at worst, at {fit.points} points that it was not made of"
            )
        console.print(f"nodes of {costs.width}, which served {costs.start_s:.1f} s after they were launched")
        console.print(f"{options.out} has what `tandem simulate --costs` takes")
    return 0
