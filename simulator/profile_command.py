"""`tandem profile`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import key_from_environment
from tandem.cluster.saving import write_json
from tandem.simulator.costs import CostModel
from tandem.simulator.profile import QUICK, REPEATS, profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="of a cluster with one node of each role, which nothing else asks meanwhile (default: the `tandem serve` that runs on "
        "this machine)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the costs")
    parser.add_argument("--name", help="what these nodes are called (default: the file's name)")
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="of each measurement (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, each measured twice")


def run(options: argparse.Namespace, *, as_json: bool) -> CostModel:
    if options.repeats < 1:
        raise ConfigurationError(f"--repeats must be at least 1, not {options.repeats}")
    console = Console(stderr=as_json)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task("measuring", total=1.0)
        costs = asyncio.run(
            profile(
                options.url,
                key_from_environment(),
                options.name or options.out.stem,
                lambda what, share: shown.update(row, description=what, completed=share),
                repeats=2 if options.quick else options.repeats,
                grid=QUICK if options.quick else None,
            )
        )
    write_json(costs, options.out)
    if not as_json:
        for name, fit in costs.fit.items():
            console.print(
                f"{name}: {fit.median:.1%} wrong in the median, {fit.worst:.1%} at worst, at {fit.points} points that it was not made of"
            )
        console.print(f"nodes of {costs.width}, which served {costs.start_s:.1f} s after they were launched")
        console.print(f"{options.out} has what `tandem simulate --costs` takes")
    return costs
